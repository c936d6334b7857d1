# %% [markdown]
# # Notebook: ten images in place of a thousand
#
# One image for each class is learnt such that a model trained on these ten images alone does well on all training images.

# %%
import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression

import nhgd

X, y = load_digits(return_X_y=True)
random = np.random.default_rng(0)
train, test = np.split(random.permutation(len(y)), [1300])

# %%
distiller = nhgd.DatasetDistiller(per_class=1, random_state=0, verbose=True).fit(X[train], y[train])

# %% [markdown]
# The learnt images, and below them what each has that their mean has not. They need not look like digits: at the optimum the
# model is a combination of them, and only what differs between them tells classes apart.

# %%
figure, cells = plt.subplots(2, 10, figsize=(9, 2.3), layout="constrained")
for rows, images in zip(cells, (distiller.images_, distiller.images_ - distiller.images_.mean(0)), strict=True):
    for image, axes in zip(images, rows, strict=True):
        axes.imshow(image.reshape(8, 8), cmap="gray")
        axes.axis("off")
for label, axes in zip(distiller.labels_, cells[0], strict=True):
    axes.set_title(label, fontsize=10)

# %% [markdown]
# A linear model trained from scratch on ten images: the learnt ones, and real ones, drawn ten times.


# %%
def trained_on(images, labels):
    return LogisticRegression(max_iter=2000).fit(images / 16, labels).score(X[test] / 16, y[test])


drawn = [[random.choice(np.flatnonzero(y[train] == c)) for c in range(10)] for _ in range(10)]
real = [trained_on(X[train][some], y[train][some]) for some in drawn]
print(f"test accuracy, ten learnt images:          {distiller.score(X[test], y[test]):.3f}")
print(f"test accuracy, ten real images:            {np.mean(real):.3f} ± {np.std(real):.3f}")
print(f"test accuracy, all {len(train)} training images:  {trained_on(X[train], y[train]):.3f}")

# %%
losses = [row["outer_loss"] for row in distiller.history_]
figure, axes = plt.subplots(figsize=(6, 2.6), layout="constrained")
axes.semilogy(losses)
_ = axes.set(xlabel="outer step", ylabel="loss on the training set")
