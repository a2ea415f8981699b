import sys, os, pathlib, tempfile
from tests.integrations.verl import conftest
from tests.integrations.verl.scenarios import ONE, TWO, HYBRIDS
if __name__=="__main__":
    import torch
    ones={n:ONE[n] for n in ("stock-images","images","walk-images","stock-screens","walk-screens")}
    ones|={n:HYBRIDS[n] for n in ("stock-images-3.5","walk-images-3.5")} if len(sys.argv)>2 else {}
    twos={n:TWO[n] for n in ("dp2-walk-images",)}
    folder=pathlib.Path(tempfile.mkdtemp())
    res=conftest.each_once(folder, {"one":(1,ones),"two":(2,twos)})
    from tests.integrations.verl.test_equivalence import *
    for name, ref in [("images","stock-images"),("walk-images","stock-images"),("walk-screens","stock-screens")]+([("walk-images-3.5","stock-images-3.5")] if len(sys.argv)>2 else [])+([("dp2-walk-images","stock-images")] if len(sys.argv)>1 else []):
        f, s = res(name), res(ref)
        for w in SCORES:
            if w in s[0]: print(name, w, float((of_all_ranks(f,w)-of_all_ranks(s,w)).abs().max()))
        for m in METRICS:
            if m in s[0]["metrics"]: print(name, m, f[0]["metrics"][m], s[0]["metrics"][m])
        print(name, "weights", max(distance(x["weights"], s[0]["weights"]) for x in f), max(distance(steps(x), steps(s[0])) for x in f), {k:v for k,v in f[0]["metrics"].items() if "dualkv" in k}, flush=True)
