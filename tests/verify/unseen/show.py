import sys, traceback
import numpy as np
from tests.verify.unseen import witness
from tests.verify.unseen.build import build, right
from tests.verify.unseen.wrong import WRONG
bad = 0
names = [(w.op, w.name) for w in WRONG]
assert len(set(names)) == len(names)
for w in WRONG:
    if len(sys.argv) > 1 and sys.argv[1] not in w.op + "/" + w.name: continue
    try:
        call = eval(w.witness, dict(witness.NAMES, np=np))
        r = witness.differs(right(w.op), call)
        why = witness.differs(build(w), call)
    except Exception as e:
        r, why = "", ""
        print(w.op, w.name, "RAISED", traceback.format_exc().splitlines()[-3:])
    if r: print("RIGHT DIFFERS", w.op, w.name, r)
    if not why: bad += 1; print("NO WITNESS", w.op, w.name)
    elif len(sys.argv) > 1: print(w.op, w.name, why)
print(len(WRONG), bad)
