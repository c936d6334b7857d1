"""The paper's tables, measured by two protocols."""

from nhgd.reproduce.tables.experiment import Asked as Asked
from nhgd.reproduce.tables.experiment import table as table
