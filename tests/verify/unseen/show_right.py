import inspect, traceback
import numpy as np
from reference.ops import OPS
from tests.verify.unseen import witness
from tests.verify.unseen.right import all_right
from tests.verify.unseen.wrong import WRONG
calls = {}
for w in WRONG:
    calls.setdefault(w.op, []).append((w.name, eval(w.witness, dict(witness.NAMES, np=np))))
count = 0
for op, name, kind, module in all_right():
    count += 1
    tried = bad = skipped = 0
    taken = inspect.signature(getattr(module, OPS[op].forward_name)).parameters
    anything = any(p.kind == p.VAR_KEYWORD for p in taken.values())
    for which, call in calls[op]:
        if (set(call.options) - set(taken) and not anything) or (call.receivers and name not in ("tiled", *[]) and not hasattr(module, "__edited__") and kind in ("float64 inside", "bf16") or call.receivers and name[0].isupper()): skipped += 1; continue
        tried += 1
        if kind == "bf16": call = call._replace(arrays=tuple(__import__("tests.verify.unseen.right", fromlist=["bf16"]).bf16(a) for a in call.arrays), again="")
        if call.op=="attention" and call.arrays[1].shape[1] > 5000 and name == "AttentionRowByRow": continue
        try: why = witness.differs(module, call._replace(times=1))
        except Exception: why = traceback.format_exc().splitlines()[-1] + traceback.format_exc().splitlines()[-3]
        if kind == "bf16" and "off by" in why:
            a, b = float(why.split("off by ")[1].split()[0]), float(why.split(" of ")[1].split(",")[0])
            why = why if a > b * 2**-7 else ""
        if why: bad += 1; print("  ", op, name, "on", which, ":", why)
    print(op, name, kind, tried, "tried", bad, "bad", skipped, "skipped")
print(count)
