"""Letters and digits of five by seven dots, so that a drawing has the same bytes on every machine."""

import numpy as np
from jaxtyping import Bool

WIDTH, HEIGHT = 5, 7

_ROWS = """
A .###. #...# #...# ##### #...# #...# #...#
B ####. #...# #...# ####. #...# #...# ####.
C .###. #...# #.... #.... #.... #...# .###.
D ####. #...# #...# #...# #...# #...# ####.
E ##### #.... #.... ####. #.... #.... #####
F ##### #.... #.... ####. #.... #.... #....
G .###. #...# #.... #.### #...# #...# .###.
H #...# #...# #...# ##### #...# #...# #...#
I .###. ..#.. ..#.. ..#.. ..#.. ..#.. .###.
J ..### ...#. ...#. ...#. ...#. #..#. .##..
K #...# #..#. #.#.. ##... #.#.. #..#. #...#
L #.... #.... #.... #.... #.... #.... #####
M #...# ##.## #.#.# #.#.# #...# #...# #...#
N #...# ##..# #.#.# #..## #...# #...# #...#
O .###. #...# #...# #...# #...# #...# .###.
P ####. #...# #...# ####. #.... #.... #....
Q .###. #...# #...# #...# #.#.# #..#. .##.#
R ####. #...# #...# ####. #.#.. #..#. #...#
S .#### #.... #.... .###. ....# ....# ####.
T ##### ..#.. ..#.. ..#.. ..#.. ..#.. ..#..
U #...# #...# #...# #...# #...# #...# .###.
V #...# #...# #...# #...# #...# .#.#. ..#..
W #...# #...# #...# #.#.# #.#.# ##.## #...#
X #...# #...# .#.#. ..#.. .#.#. #...# #...#
Y #...# #...# .#.#. ..#.. ..#.. ..#.. ..#..
Z ##### ....# ...#. ..#.. .#... #.... #####
0 .###. #...# #..## #.#.# ##..# #...# .###.
1 ..#.. .##.. ..#.. ..#.. ..#.. ..#.. .###.
2 .###. #...# ....# ...#. ..#.. .#... #####
3 ##### ...#. ..#.. ...#. ....# #...# .###.
4 ...#. ..##. .#.#. #..#. ##### ...#. ...#.
5 ##### #.... ####. ....# ....# #...# .###.
6 ..##. .#... #.... ####. #...# #...# .###.
7 ##### ....# ...#. ..#.. .#... .#... .#...
8 .###. #...# #...# .###. #...# #...# .###.
9 .###. #...# #...# .#### ....# ...#. .##..
"""

GLYPHS: dict[str, Bool[np.ndarray, "rows columns"]] = {
    line[0]: np.array([[dot == "#" for dot in row] for row in line[2:].split()]) for line in _ROWS.split("\n") if line
}
"""Character -> its dots."""


def dots(text: str, scale: int, pitch: int) -> Bool[np.ndarray, "height width"]:
    """A line of text as dots.

    Args:
      text: letters of either case, and digits.
      scale: pixels of a side of one dot.
      pitch: pixels from one character to the next.
    """
    line = np.zeros((HEIGHT * scale, pitch * (len(text) - 1) + WIDTH * scale), bool)
    for at, character in enumerate(text.upper()):
        glyph = np.kron(GLYPHS[character], np.ones((scale, scale), bool))
        line[:, at * pitch : at * pitch + glyph.shape[1]] |= glyph
    return line
