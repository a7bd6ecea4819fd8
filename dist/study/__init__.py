"""The study: the ladder's rungs, and exercises that are graded by ``accel.verify``.

An exercise is a file of the repository with a function left blank, made from the source itself
(``blank.py``), so its solution is that source. ``tracks`` has the exercises, four tracks of them;
``grade.py`` holds somebody's file to the reference and names the mistake.
"""
