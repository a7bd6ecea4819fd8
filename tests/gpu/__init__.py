"""What only a GPU can show. Without a usable one these tests skip and say why."""
