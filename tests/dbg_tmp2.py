import sys, os, pathlib, tempfile
from tests.integrations.verl import conftest
from tests.integrations.verl.scenarios import ONE, TWO, HYBRIDS
if __name__=="__main__":
    import torch
    from tests.integrations.verl import scenarios as S, rollouts as R
    import sys
    h={"stock-images-3.5":S.PADDED|S.HYBRID_IMAGES|S.LONG_PROMPTS,"walk-images-3.5":S.WALK|S.HYBRID_IMAGES}
    folder=pathlib.Path(tempfile.mkdtemp())
    res=conftest.each_once(folder, {"h":(1,h),"one":(1,{"stock-walk-images":ONE["stock-walk-images"]}),"two":(2,{n:TWO[n] for n in ("dp2-walk-images",)})})
    from tests.integrations.verl.test_equivalence import *
    for name, ref in [("dp2-walk-images","stock-walk-images")]:
        f, s = res(name), res(ref)
        print(name, [x.get("error") for x in f+s], [list(x) for x in f+s])
        for w in SCORES:
            if w in s[0]: print(name, w, float((of_all_ranks(f,w)-of_all_ranks(s,w)).abs().max()))
        for x in f: print(name, sorted(((float((x["weights"][k]-v).norm()/v.norm()), k) for k,v in s[0]["weights"].items()), reverse=True)[:5])
