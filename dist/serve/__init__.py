"""``myllm serve``: a model that others talk to over HTTP, in the form of OpenAI's API."""
