# %% [markdown]
# # Notebook: finding wrong labels
#
# A thousand handwritten digits, 30 % of them with a wrong label. Two hundred more have labels that can be trusted. Which
# labels are wrong? First with `LabelCleaner`, then as a bilevel problem of one's own.

# %%
import matplotlib.pyplot as plt
import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.metrics import f1_score

import nhgd

X, y = load_digits(return_X_y=True)
random = np.random.default_rng(0)
train, trusted, test = np.split(random.permutation(len(y)), [1000, 1200])
wrong = random.random(len(train)) < 0.3
noisy = np.where(wrong, (y[train] + random.integers(1, 10, len(train))) % 10, y[train])
print(f"{wrong.sum()} of {len(train)} labels are wrong")

# %% [markdown]
# ## The short way
#
# `LabelCleaner` follows scikit-learn's conventions. Fitted, it says which labels it suspects.

# %%
cleaner = nhgd.LabelCleaner(random_state=0, verbose=True)
cleaner.fit(X[train], noisy, X[trusted], y[trusted])

# %%
suspect = cleaner.weights_ < 0.5
print(f"F1 of finding wrong labels: {f1_score(wrong, suspect):.3f}")
print(f"test accuracy of the cleaned model: {cleaner.score(X[test], y[test]):.3f}")
print(f"suggested labels that are right: {(cleaner.suggested_labels_[suspect] == y[train][suspect]).mean():.3f}")

# %% [markdown]
# The labels that are most probably wrong, with the class that is suggested:

# %%
figure, cells = plt.subplots(2, 8, figsize=(9, 2.9), layout="constrained")
for i, axes in zip(cleaner.label_issues_, cells.flat, strict=False):
    axes.imshow(X[train][i].reshape(8, 8), cmap="gray_r")
    axes.set_title(f"{noisy[i]} → {cleaner.suggested_labels_[i]}", fontsize=10)
    axes.axis("off")

# %% [markdown]
# ## As a problem of one's own
#
# A weight for each sample is learnt such that a model trained with these weights does well on the trusted samples.

# %%
mean, deviation = X[train].mean(0), X[train].std(0) + 1e-6
x, x_trusted = (torch.tensor((X[part] - mean) / deviation, dtype=torch.float32) for part in (train, trusted))
labels, y_trusted = torch.tensor(noisy), torch.tensor(y[trusted])
net, v = torch.nn.Linear(64, 10), torch.full((1000,), 0.5)


def inner(net, v, batch):
    x, y, index = batch
    z = net(x)
    return nhgd.Losses(F.cross_entropy(z, y, reduction="none"), weights=v[index], outputs=z)


def outer(net, v, batch):
    return F.cross_entropy(net(batch[0]), batch[1])


problem = nhgd.Bilevel(inner, outer, theta=net, v=v, l2=1e-2, likelihood="categorical")
solver = nhgd.Solver(
    problem,
    nhgd.Data(x, labels, batch=250),
    nhgd.Data(x_trusted, y_trusted),
    method="nhgd",
    inner_steps=20,
    inner_lr=0.1,
    outer_optimizer=torch.optim.Adam,
    outer_lr=0.05,
    project_v=(0, 1),
)
solution = solver.run(steps=30)
solution

# %%
solution.plot()

# %%
print(
    f"mean weight of right labels {v[~torch.tensor(wrong)].mean():.2f}, of wrong ones {v[torch.tensor(wrong)].mean():.2f}"
)

# %% [markdown]
# ## Was the hypergradient right?

# %%
everything = (x, labels, torch.arange(len(x)))
nhgd.check(problem, everything, (x_trusted, y_trusted), inverses=["kfac", "refined", "cg", "identity"])

# %% [markdown]
# Cosine and relative error are those of the hypergradient at the learnt weights. What each inverse would need:

# %%
nhgd.plan(problem, everything, inverses=["kfac", "refined", "cg", "identity"])
