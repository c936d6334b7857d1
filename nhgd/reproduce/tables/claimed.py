"""What the paper's tables say, to stand beside what is measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Claimed(NamedTuple):
    """Averages over the last 50 epochs, with what is printed behind the +-, whose meaning is open."""

    outer_loss: float
    outer_loss_spread: float
    test_accuracy: float | None = None
    test_accuracy_spread: float | None = None


CLAIMED: Mapping[str, Mapping[str, Claimed]] = {
    "cleaning": {
        "nhgd-paper": Claimed(0.2765, 0.0197, 0.9180, 0.0003),
        "stocbio": Claimed(0.4253, 0.0170, 0.9060, 0.0004),
        "amigo": Claimed(0.1925, 0.0200, 0.9101, 0.0002),
        "ttsa": Claimed(0.2350, 0.0202, 0.9172, 0.0002),
        "soba": Claimed(0.1055, 0.0092, 0.8924, 0.0005),
        "aid-neumann-10": Claimed(0.2627, 0.0194, 0.9168, 0.0002),
        "aid-neumann-40": Claimed(0.2244, 0.0205, 0.9170, 0.0003),
        "aid-cg-10": Claimed(0.1880, 0.0143, 0.9127, 0.0003),
        "aid-cg-40": Claimed(0.1488, 0.0130, 0.9067, 0.0003),
    },
    "distillation-5": {
        "nhgd-paper": Claimed(0.4733, 0.0941, 0.8256, 0.0047),
        "amigo": Claimed(0.8072, 0.0644, 0.6934, 0.0071),
        "ttsa": Claimed(0.6569, 0.1105, 0.8015, 0.0045),
        "soba": Claimed(1.1215, 0.0632, 0.5847, 0.0018),
        "aid-neumann-10": Claimed(0.8450, 0.1526, 0.7840, 0.0015),
        "aid-neumann-40": Claimed(0.4895, 0.0885, 0.8216, 0.0017),
        "aid-cg-10": Claimed(0.6288, 0.0679, 0.7820, 0.0010),
        "aid-cg-40": Claimed(0.6227, 0.0686, 0.7745, 0.0015),
    },
    "distillation-100": {
        "nhgd-paper": Claimed(0.4701, 0.0941, 0.8281, 0.0022),
        "stocbio": Claimed(0.4778, 0.0851, 0.8279, 0.0015),
        "amigo": Claimed(0.4899, 0.0786, 0.8312, 0.0004),
        "ttsa": Claimed(0.7495, 0.1357, 0.7710, 0.0006),
        "soba": Claimed(0.5591, 0.1311, 0.8010, 0.0007),
        "aid-neumann-10": Claimed(0.4529, 0.0858, 0.8359, 0.0006),
        "aid-neumann-40": Claimed(0.4538, 0.0891, 0.8337, 0.0020),
        "aid-cg-10": Claimed(0.4601, 0.0792, 0.8332, 0.0012),
        "aid-cg-40": Claimed(0.5092, 0.0789, 0.8206, 0.0022),
    },
    "pde": {
        "nhgd-paper": Claimed(0.0266, 0.0005),
        "aid-broyden": Claimed(0.0237, 0.0003),
    },
}
