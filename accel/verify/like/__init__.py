"""A reference of one's own: functions of any framework, held to a plain version of themselves.

    myllm verify --like ref.py --module new.py

``declared.py`` reads shapes, ``found.py`` finds them, ``bound.py`` says how close is close,
``subject.py`` draws, calls and judges, and the search, the report and the processes are those of
``accel.verify``.
"""
