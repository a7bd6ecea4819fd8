"""Weights to and from the files of others: Hugging Face folders, GGUF, llm.c's checkpoints.

``families.py`` declares what each family of models is called elsewhere, once for both directions;
``mapping.py`` says what such a declaration means. The other files know one format each.
"""
