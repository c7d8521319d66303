"""Shallow water: waves of a rotating sea, whose grid is cut into one part per rank, with `mpicomm.HaloExchange`.

The sea is periodic from west to east, and has walls in the north and the south. A round hill of water collapses into
waves; what the rotation holds back remains. On a staggered grid (Arakawa C), the height is in the middle of a cell, the
velocities are on its eastern and northern sides. A step first advances the velocities by the slope of the surface and
the Coriolis force, then the height by the new velocities, with one exchange of halos after each. All numbers are the
same on any number of ranks, since a cell depends on its neighbours only.

    $ mpirun -n 4 python -m mpicomm.examples.shallow_water
    180 x 360 cells in 2 x 2 parts, 400 steps in 4.81 s
    volume 1.620177e+14 m3 before, 1.620177e+14 m3 after; highest wave 0.179 m
    ===============+*##%%#*+-::.      .:-=+*##*++===============
    ==============+***+-:::-==++++++==--::::-+***+==============
    =============+**+-:...:-==++++++++==-:...:-+**+=============
    ============+**=:...:-===++++++++++===-:...:=**+============
    ===========+**=:...--==++++******++++==--...:=**+===========
    ==========+**+-...:-=++++***####***++++=-:...-+**+==========
    ==========+**=:..:-==+++**##%%%%##**+++==-:..:=**+==========
    ==========+**=:..:-==++***#%@@@@%#***++==-:..:=**+==========
    ==========+**=:..:-==+++**##%%%%##**+++==-:..:=**+==========
    ==========+**+-...:-=++++***####***++++=-:...-+**+==========
    ===========+**=:...--==++++******++++==--...:=**+===========
    ============+**=:...:-===++++++++++===-:...:=**+============
    =============+**+-:...:-==++++++++==-:...:-+**+=============
    ==============+***+-::::--==++++++==-:::-+***+==============
    ===============++*##*+=-:.      .::-+*#%%##*+===============
"""

from __future__ import annotations

import argparse
import importlib
import math
import time
from pathlib import Path

import torch

import mpicomm

ROWS, COLUMNS = 180, 360
STEPS = 400
CELL = 5e3  # m
GRAVITY = 9.81  # m/s^2
CORIOLIS = 2e-4  # 1/s
DEPTH = 100.0  # m
HILL, RADIUS = 1.0, 15 * CELL  # m, its height and width
STEP = 0.25 * CELL / math.sqrt(GRAVITY * (DEPTH + HILL))  # s
LEVELS = " .:-=+*#%@"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--plot", metavar="F.png", type=Path, help="plot the height to this file (needs matplotlib)")
    options = parser.parse_args()
    if options.plot is not None:
        importlib.import_module("matplotlib.image")  # before the run, on all ranks: it may not be installed
    world = mpicomm.bootstrap()
    sea = Sea(world)
    volume = sea.volume()
    start = time.perf_counter()
    for _ in range(options.steps):
        sea.step()
    seconds = time.perf_counter() - start
    last_volume = sea.volume()
    height = sea.height()
    if height is not None:
        rows, columns = sea.exchange.grid
        print(f"{ROWS} x {COLUMNS} cells in {rows} x {columns} parts, {options.steps} steps in {seconds:.2f} s")
        print(f"volume {volume:.6e} m3 before, {last_volume:.6e} m3 after; highest wave {height.max() - DEPTH:.3f} m")
        print(as_text(height), flush=True)
        if options.plot is not None:
            plot(height, options.plot)


class Sea:
    """This rank's part of the sea, with a halo of one cell."""

    def __init__(self, world: mpicomm.World) -> None:
        self.grid = parts_of(world.size)
        self.exchange = mpicomm.HaloExchange(self.grid, periodic=(False, True))
        row, column = self.exchange.coordinates
        y, x = own_centers(ROWS, self.grid[0], row), own_centers(COLUMNS, self.grid[1], column)
        distance = (y[:, None] - ROWS * CELL / 2) ** 2 + (x[None, :] - COLUMNS * CELL / 2) ** 2
        self.h = (DEPTH + HILL * torch.exp(-distance / RADIUS**2)).to(world.device)
        self.u, self.v = torch.zeros_like(self.h), torch.zeros_like(self.h)
        self.is_northernmost = row + 1 == self.grid[0]
        self.exchange(self.h, inplace=True)

    def step(self) -> None:
        """Advance the sea by one time step (collective)."""
        h, u, v = self.h, self.u, self.v
        slope_x, slope_y = (east(h) - middle(h)) / CELL, (north(h) - middle(h)) / CELL
        v_beside_u = (middle(v) + east(v) + south(v) + v[:-2, 2:]) / 4
        u_beside_v = (middle(u) + north(u) + west(u) + u[2:, :-2]) / 4
        new_u = middle(u) + STEP * (CORIOLIS * v_beside_u - GRAVITY * slope_x)
        new_v = middle(v) - STEP * (CORIOLIS * u_beside_v + GRAVITY * slope_y)
        middle(u).copy_(new_u)
        middle(v).copy_(new_v)
        if self.is_northernmost:
            v[-2] = 0  # the wall; that in the south is a halo, which stays zero
        self.exchange([u, v], inplace=True)

        flow_x = middle(u) * (middle(h) + east(h)) / 2
        flow_y = middle(v) * (middle(h) + north(h)) / 2
        flow_from_west = west(u) * (west(h) + middle(h)) / 2
        flow_from_south = south(v) * (south(h) + middle(h)) / 2
        middle(h).sub_(STEP / CELL * (flow_x - flow_from_west + flow_y - flow_from_south))
        self.exchange(h, inplace=True)

    def volume(self) -> float:
        """Return the volume of the whole sea in cubic meters (collective)."""
        return mpicomm.all_reduce(CELL**2 * middle(self.h).sum().item())

    def height(self) -> torch.Tensor | None:
        """Return the height of the whole sea on rank 0, None on the other ranks (collective)."""
        parts = mpicomm.gather(middle(self.h).flatten().cpu())
        if parts is None:
            return None
        rows, columns = (lengths(*each) for each in zip((ROWS, COLUMNS), self.grid, strict=True))
        shapes = [(row, column) for row in rows for column in columns]
        tiles = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
        return torch.cat([torch.cat(tiles[at : at + len(columns)], 1) for at in range(0, len(tiles), len(columns))])


# -- the grid ----------------------------------------------------------------------------------------------------------


def parts_of(ranks: int) -> tuple[int, int]:
    """Return a grid of parts that are as square as possible."""
    rows = max(rows for rows in range(1, math.isqrt(ranks) + 1) if ranks % rows == 0)
    return rows, ranks // rows


def lengths(cells: int, parts: int) -> list[int]:
    """Return the number of cells of each part of a dimension."""
    return [len(part) for part in torch.arange(cells).tensor_split(parts)]


def own_centers(cells: int, parts: int, place: int) -> torch.Tensor:
    """Return where the centers of the cells of a part are, in m, with those of its halo."""
    own = torch.arange(cells, dtype=torch.float64).tensor_split(parts)[place]
    return (torch.arange(own[0].item() - 1, own[-1].item() + 2, dtype=torch.float64) + 0.5) * CELL


def middle(field: torch.Tensor) -> torch.Tensor:
    """Return the cells without the halo; the next functions return their neighbours."""
    return field[1:-1, 1:-1]


def east(field: torch.Tensor) -> torch.Tensor:
    return field[1:-1, 2:]


def west(field: torch.Tensor) -> torch.Tensor:
    return field[1:-1, :-2]


def north(field: torch.Tensor) -> torch.Tensor:
    return field[2:, 1:-1]


def south(field: torch.Tensor) -> torch.Tensor:
    return field[:-2, 1:-1]


# -- pictures ----------------------------------------------------------------------------------------------------------


def as_text(height: torch.Tensor) -> str:
    """Return a map with the north above, darker where the water is higher."""
    coarse = torch.nn.functional.adaptive_avg_pool2d(height[None], (15, 60))[0].flip(0)
    low, high = coarse.min(), coarse.max()
    levels = ((coarse - low) / (high - low) * (len(LEVELS) - 1)).round().int()
    return "\n".join("".join(LEVELS[level] for level in row) for row in levels.tolist())


def plot(height: torch.Tensor, path: Path) -> None:
    """Write a picture of the height to a PNG file."""
    import matplotlib.image

    matplotlib.image.imsave(path, height.numpy(), origin="lower", cmap="viridis")


if __name__ == "__main__":
    main()
