# %% [markdown]
# # Notebook: control of the heat equation
#
# Which heat source f(t) makes the temperature of a plate follow a target? theta is a network for the temperature, trained on
# the residuals of the equation; v is a network for the source.

# %%
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from IPython.display import Image, display

import nhgd

task = nhgd.task.PDE.preset("quick")
instance = task.build(seed=0, device=torch.device("cpu"))

# %% [markdown]
# The task knows what suits it: natural inner steps, and the exact Fisher matrix in the space of the points, by one
# factorisation for both.

# %%
solver = instance.start()
solution = solver.run(steps=instance.steps, progress=True)
solution

# %%
solution.plot()

# %% [markdown]
# `true_objective` is computed without any network, from the equation with the learnt source; no source can have one below
# `lower_bound`.

# %%
for name, value in instance.summary(solution).items():
    print(f"{name:22} {value:.4g}")

# %%
with TemporaryDirectory() as folder:
    for picture in instance.pictures(Path(folder)):
        display(Image(picture))

# %% [markdown]
# What other inverses would make of the same point:

# %%
nhgd.check(
    instance.problem,
    instance.full_inner,
    instance.full_outer,
    inverses=[nhgd.inverse.FisherWindow(window=2000, fisher="exact", records="sample"), "cg", "identity"],
)
