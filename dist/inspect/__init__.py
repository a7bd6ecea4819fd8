"""``myllm inspect``: one page that shows what a trained model makes of a text.

``trace.py`` runs the model forward and backward and keeps what there is to see, ``page.html`` is
the page, ``cli.py`` puts the one into the other.
"""
