"""Write questions of two kinds for ``follow_real``: prose that users asked, and made-up arithmetic and Python.

The second kind has word problems, which chains of events make up, functions to complete whose examples are computed,
and functions of Python's standard library without their bodies. All draws follow from a seed.
"""

# ruff: noqa: SIM905 (lists of words)
from __future__ import annotations

import ast
import math
import random
import re
import sysconfig
import warnings
from collections import Counter, deque
from functools import cache
from itertools import accumulate, islice, pairwise, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

LONGEST_PROSE = 1000
"""Characters of a question in prose."""
ALIKE = 0.6
"""Share of common word triples from which on two questions are near-duplicates. Numbers count as one word."""
OTHER_KIND = re.compile(
    r"```|[{}<>;=\\]|\d\s*[-+*/x%^]\s*\d|\b(?:code|coding|cod(?:er|ed)|python|java|javascript|typescript|sql|html|css|"
    r"php|bash|shell|script|regex|json|xml|yaml|api|algorithm|function|program\w*|software|excel|formula|spreadsheet|"
    r"linux|git|github|docker|aws|azure|react\w*|angular|node|django|flask|c\+\+|c#|vba|macro|database|query|server|"
    r"class|array|variable|compile\w*|debug\w*|unity|unreal|arduino|terminal|pandas|numpy|tensor\w*|pytorch|"
    r"calculat\w+|comput\w+|equations?|solve|math\w*|arithmetic|algebra|derivative|integral|matrix|probability|"
    r"how (?:many|much)|percent\w*|sum|average)\b",
    re.IGNORECASE,
)
"""Words and signs of questions that may be about code or arithmetic."""
NAMES = (
    "Aisha Ben Carla Dmitri Elena Farid Grace Hiro Ines Jamal Kofi Lena Marco Nadia Oscar Priya "
    "Quinn Rosa Samir Tara "
    "Uma Viktor Wanda Ximena Yusuf Zoe Amir Bella Chen Dora Emil Fiona Goran Hana Ivan Julia Kamal Lucia Mei Noor"
).split()
THINGS = (
    "apples the orchard, stickers an album, marbles a jar, seashells the beach, postcards a drawer, bricks the yard, "
    "tulips the garden, cookies the bakery, stamps a folder, tickets the theatre, pencils the classroom, eggs "
    "the farm, candles the shop, books the library, bottles the cellar, shirts the wardrobe, coins "
    "a purse, tiles the "
    "storeroom, balloons the hall, lemons the kitchen, cards a deck, beads a box, plates the "
    "canteen, buttons a tin, chairs the "
    "office, lamps the warehouse, batteries the workshop, muffins the cafe, carrots the field, photos an exhibition, "
    "cups the cupboard, parcels the van"
).split(", ")
"""Things, each with a place where they are."""
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
ASKED = (
    "{}", "{}", "{} Explain your steps.", "Solve this problem step by step.\n{}",
    "{}\nGive the final number at the end.",
    "{} Show the calculation.", "Please work this out: {}", "{}\nLet's go one step at a time.",
)  # fmt: skip
COMPLETE = (
    "Complete this Python function:\n\n```python\n{}```",
    "Write the body of the following function.\n\n```python\n{}```",
    "```python\n{}```\nImplement this function.", "Finish the code below and return only Python.\n\n{}",
    "Here is a signature with its docstring. Please write the function.\n\n```python\n{}```",
    "Implement the function that this docstring describes:\n\n{}",
)  # fmt: skip


def prose_questions(questions: Iterable[str]) -> list[str]:
    """Return the questions that seem to be about neither code nor arithmetic, without near-duplicates."""
    return list(
        different(text for text in questions if len(text) <= LONGEST_PROSE and not OTHER_KIND.search(text))
    )


def new_questions(number: int, seed: int) -> list[str]:
    """Return that many questions, a half of them word problems, the others about Python, in a random order."""
    draw = random.Random(f"questions {seed}")
    half, library = number // 2, library_functions()
    of_library = draw.sample(library, min(len(library), number // 3))
    made_up = number - half - len(of_library)
    texts = [
        *islice(different(draw.choice(ASKED).format(problem(draw)) for _ in repeat(None)), half),
        *islice(different(draw.choice(COMPLETE).format(function(draw)) for _ in repeat(None)), made_up),
        *(draw.choice(COMPLETE).format(code) for code in of_library),
    ]
    draw.shuffle(texts)
    return texts


def different(texts: Iterable[str]) -> Iterator[str]:
    """Yield the texts that are no near-duplicates of one before."""
    holders: dict[tuple[str, ...], list[int]] = {}
    sizes: list[int] = []
    for text in texts:
        words = re.findall(r"\w+|[^\w\s]", re.sub(r"\d+", "0", text.lower()))
        triples = set(zip(words, words[1:], words[2:], strict=False)) or {tuple(words)}
        common = Counter(place for triple in triples for place in holders.get(triple, ()))
        if all(both < ALIKE * (sizes[place] + len(triples) - both) for place, both in common.items()):
            for triple in triples:
                holders.setdefault(triple, []).append(len(sizes))
            sizes.append(len(triples))
            yield text


def problem(draw: random.Random) -> str:
    """Return a word problem."""
    return draw.choice((_chain, _chain, _chain, _chain, *PROBLEMS))(draw)


def _chain(draw: random.Random) -> str:
    """Return a problem in which a number of things changes several times."""
    name, friend = draw.sample(NAMES, 2)
    things, place = draw.choice(THINGS).split(" ", 1)
    text, count = _opening(draw, name, things, place)
    for _ in range(draw.randint(1, 3)):
        event, count = _event(draw, name, friend, things, count)
        text += f" {event}"
    return f"{text} {_closing(draw, name, things, count)}"


def _opening(draw: random.Random, name: str, things: str, place: str) -> tuple[str, int]:
    boxes, each, first, second = (draw.randint(3, 24) for _ in range(4))
    one, other = draw.sample(DAYS, 2)
    return draw.choice(
        (
            (f"{name} has {boxes * each} {things}.", boxes * each),
            (f"There are {boxes * each} {things} in {place}.", boxes * each),
            (f"{name} fills {boxes} boxes with {each} {things} each.", boxes * each),
            (f"In {place}, {boxes} rows of {each} {things} stand ready.", boxes * each),
            (f"On {one} {name} counts {first} {things} in {place}, and on {other} {second} others.", first + second),
            (f"{name} needs {things} for a party and gets {first} from a neighbour and {second} from school.",
             first + second),
            (f"A shop sells {things} in packs of {each}, and {name} buys {boxes} packs.", boxes * each),
            (f"Last year {name} collected {first} {things}, and this year {first + second}.", 2 * first + second),
        )
    )  # fmt: skip


def _event(draw: random.Random, name: str, friend: str, things: str, count: int) -> tuple[str, int]:
    more, days = draw.randint(2, 30), draw.randint(2, 7)
    less = draw.randint(1, max(1, count // 2))
    found = [
        (f"{name} buys {more} more.", count + more),
        (f"Then {friend} brings another {more} {things}.", count + more),
        (f"{name} makes {more} new ones every day for {days} days.", count + more * days),
        (f"{name} gives {less} of them to {friend}.", count - less),
        (f"On the way home {less} {things} are lost.", count - less),
        (f"After that, {less} of the {things} are sold.", count - less),
        (f"{friend} has twice as many and adds them all.", 3 * count),
        (f"By the end of the month the number of {things} has doubled.", 2 * count),
    ]
    for part, words in ((2, "Half"), (3, "A third"), (4, "A quarter"), (5, "One fifth")):
        if count % part == 0:
            found += [
                (
                    f"{words} of the {things} turn out to be damaged and are thrown away.",
                    count - count // part,
                ),
                (f"{words} of them go to {friend}, who needs some, too.", count - count // part),
            ]
    for percent in (10, 20, 30, 40, 75):
        if count * percent % 100 == 0:
            found.append((f"{name} puts {percent}% of the {things} aside.", count - count * percent // 100))
    return draw.choice(found)


def _closing(draw: random.Random, name: str, things: str, count: int) -> str:
    price, people = draw.randint(2, 15), draw.randint(2, 9)
    found = [
        f"How many {things} are there now?", f"How many {things} does {name} have left?",
        f"If each is worth {price} dollars, how many dollars are all of them worth?",
        f"{name} wants to have {count + price * people}. How many are missing?",
        f"They are packed into bags of {people}. How many bags are full, and how many {things} remain?",
        f"What is the largest number of {things} that each of {people} children can get if all get the same?",
    ]  # fmt: skip
    return draw.choice(found)


def _journey(draw: random.Random) -> str:
    name, speed, hours, other = (
        draw.choice(NAMES),
        5 * draw.randint(2, 24),
        draw.randint(2, 9),
        draw.randint(1, 4),
    )
    vehicle = draw.choice("bicycle car truck train scooter boat bus tractor".split())
    return (
        f"{name} travels by {vehicle} at {speed} km per hour for {hours} hours, rests for {other} "
        f"hours, and then goes "
        f"on for {other} hours at {draw.choice(('half', 'twice', 'the same'))} speed. "
        f"{draw.choice(('How far is the whole way?', 'What is the average speed, with the rest?'))}"
    )  # fmt: skip


def _shopping(draw: random.Random) -> str:
    name, (one, other) = draw.choice(NAMES), (thing.split()[0] for thing in draw.sample(THINGS, 2))
    note, discount = draw.choice((50, 100, 200)), draw.choice((5, 10, 15, 20, 25))
    return (
        f"{name} buys {draw.randint(2, 9)} {one} at ${draw.randint(1, 6)}.50 each and {draw.randint(2, 9)} "
        f"{other} at ${draw.randint(2, 9)} each. The shop takes {discount}% off the "
        f"{draw.choice(('total', one, other))}. "
        f"How much change does {name} get from a ${note} note?"
    )


def _ages(draw: random.Random) -> str:
    one, other, third = draw.sample(NAMES, 3)
    times, years, age = draw.randint(2, 4), draw.randint(2, 12), draw.randint(6, 18)
    return (
        f"{one} is {times} times as old as {other}, who is {age} years old. {third} is {years} years "
        f"{draw.choice(('younger', 'older'))} than {draw.choice((one, other))}. "
        f"{draw.choice((f'How old will {third} be in {years} years?', 'What is the sum of their three ages?'))}"
    )


def _wages(draw: random.Random) -> str:
    name, job = (
        draw.choice(NAMES),
        draw.choice("gardener cook painter tutor driver nurse tailor waiter guard".split()),
    )
    hours, rate, extra = draw.randint(30, 44), draw.randint(9, 32), draw.randint(2, 9)
    return (
        f"As a {job}, {name} earns ${rate} an hour for {hours} hours a week, and one and a half times as much for "
        f"each hour beyond that. This week {name} works {hours + extra} hours and spends ${10 * extra} on "
        f"{draw.choice(('travel', 'food', 'rent', 'tools', 'a present'))}. How much is left of this week's pay?"
    )  # fmt: skip


def _recipe(draw: random.Random) -> str:
    what, part = draw.choice("soup bread pancakes salad jam lemonade curry".split()), draw.sample(
        "flour sugar milk rice butter water oil honey beans".split(), 2
    )  # fmt: skip
    people, more = draw.randint(2, 6), draw.randint(2, 5)
    return (
        f"A recipe of {what} for {people} people takes {50 * draw.randint(2, 9)} g of {part[0]} and "
        f"{25 * draw.randint(1, 9)} g of {part[1]}. {draw.choice(NAMES)} cooks for {people * more} "
        f"guests but has only "
        f"{100 * draw.randint(3, 9)} g of {part[0]}. How many grams of {draw.choice(part)} must be bought?"
    )  # fmt: skip


def _area(draw: random.Random) -> str:
    width, length, cost = draw.randint(4, 30), draw.randint(31, 60), draw.randint(3, 18)
    what = draw.choice(("garden", "playground", "field", "hall", "car park", "terrace", "pool"))
    return draw.choice(
        (
            f"A rectangular {what} is {length} m long and {width} m wide. A fence costs ${cost} a "
            f"metre and has a gate "
            f"of {cost % 3 + 1} m that is free. What does the fence cost?",
            f"The {what} of a school measures {length} by {width} metres. A path of {cost % 4 + 1} "
            f"m runs around it. What "
            "is the area of the path?",
            f"Tiles of half a metre by half a metre cover a {what} of {width} m by {length} m. One tile in {cost} "
            "breaks. How many tiles are needed?",
        )
    )  # fmt: skip


def _tank(draw: random.Random) -> str:
    litres, fill, drain = 60 * draw.randint(4, 20), draw.randint(8, 20), draw.randint(1, 7)
    return (
        f"A {draw.choice(('tank', 'barrel', 'pond', 'basin', 'pool'))} holds {litres} litres. A "
        f"{draw.choice(('pump', 'pipe', 'hose', 'tap'))} adds {fill} litres a minute while {drain} "
        f"litres a minute leak "
        f"out. It starts {draw.choice(('empty', 'half full', 'a quarter full'))}. After how many minutes is it full?"
    )


def _groups(draw: random.Random) -> str:
    pupils, boys, buses = 10 * draw.randint(6, 30), draw.choice((30, 40, 50, 60)), draw.randint(2, 6)
    club = draw.choice("chess football choir swimming theatre robotics painting".split())
    return (
        f"Of the {pupils} members of a {club} club, {boys}% are boys. "
        f"{draw.choice(('A tenth', 'Half', 'A fifth'))} of "
        f"the girls and {draw.randint(3, 9)} boys go on a trip in {buses} equal groups. "
        f"{draw.choice(('How many stay at home?', 'How large is a group?', 'How many more boys than girls go?'))}"
    )


PROBLEMS = (_journey, _shopping, _ages, _wages, _recipe, _area, _tank, _groups)


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % factor for factor in range(2, math.isqrt(number) + 1))


def _digits(number: int) -> list[int]:
    return [int(digit) for digit in str(abs(number))]


Table = dict[str, "Callable[[Any], Any]"]
NUMBERS: Table = {
    "even": lambda n: n % 2 == 0, "odd": lambda n: n % 2 == 1, "positive": lambda n: n > 0,
    "negative": lambda n: n < 0,
    "prime": _is_prime, "two-digit": lambda n: 10 <= abs(n) <= 99, "non-zero": bool, "perfect square":
    lambda n: n >= 0 and math.isqrt(n) ** 2 == n, "divisible by three": lambda n: n % 3 == 0,
    "not divisible by five": lambda n: n % 5 != 0,
}  # fmt: skip
MAPPED: Table = {
    "square": lambda n: n * n, "cube": lambda n: n**3, "absolute value": abs, "double": lambda n: 2 * n,
    "sum of digits": lambda n: sum(_digits(n)), "number of digits": lambda n: len(_digits(n)), "opposite":
    lambda n: -n, "remainder modulo seven": lambda n: n % 7, "binary representation": lambda n: bin(n)[2:] if n >= 0
    else "-" + bin(n)[3:], "largest digit": lambda n: max(_digits(n)),
}  # fmt: skip
WORDS: Table = {
    "words that start with a vowel": lambda w: w[0].lower() in "aeiou", "words of more than four letters":
    lambda w: len(w) > 4, "palindromes": lambda w: w.lower() == w.lower()[::-1], "capitalised words": str.istitle,
    "words that contain the letter e": lambda w: "e" in w.lower(),
    "words of an even length": lambda w: len(w) % 2 == 0,
    "words with a repeated letter": lambda w: len(set(w.lower())) < len(w), "words without the letter a":
    lambda w: "a" not in w.lower(),
}  # fmt: skip
SPELT: Table = {
    "in reverse": lambda w: w[::-1], "in upper case": str.upper, "without its vowels":
    lambda w: re.sub("[aeiouAEIOU]", "", w), "as its number of letters": len, "with its first letter doubled":
    lambda w: w[0] + w, "with its case swapped": str.swapcase, "as its last letter": lambda w: w[-1],
    "with its letters sorted": lambda w: "".join(sorted(w.lower())),
}  # fmt: skip
RESULTS: Table = {
    "as a list": list, "as a list in ascending order": sorted, "as a list in descending order":
    lambda x: sorted(x, reverse=True), "as a list without duplicates, in order of first appearance":
    lambda x: list(dict.fromkeys(x)), "as a dictionary from each to how often it occurs": lambda x: dict(Counter(x)),
    "joined by hyphens into a string": lambda x: "-".join(map(str, x)),
    "and only the last one, or None if there is none":
    lambda x: x[-1] if x else None, "as a list rotated by one place to the right": lambda x: x[-1:] + x[:-1],
    "as a list of pairs of neighbours": lambda x: list(pairwise(x)),
    "as a tuple of the first and the last, or an empty tuple": lambda x: (x[0], x[-1]) if x else (),
    "as the list of the running maxima":
    lambda x: list(accumulate(x, max)), "as how many different ones there are": lambda x: len(set(x)),
    "as a list of runs (value, length)": lambda x: _runs(x),
    "as a list with every second one left out": lambda x: x[::2],
}  # fmt: skip
VOCABULARY = (
    "anna Berlin level summer Egypt river eye otto window tree Kayak apple island Orange yellow "
    "noon stone Madam green "
    "book letter radar ocean bird Paris umbrella cat refer tall engine"
).split()
PHRASES = (
    "Take the {which} of the {kind}, {how}, and return them {result}.",
    "From the {kind} keep only the {which}; {how}. The result is returned {result}.",
    "Return, {result}, the {which} of the given {kind}, after this change: {how}.",
    "You are given {kind}. {cap} for the {which}, ignore all others, and return what you get {result}.",
)


def _runs(values: list[Any]) -> list[tuple[Any, int]]:
    runs: deque[tuple[Any, int]] = deque()
    for value in values:
        runs.append((value, runs.pop()[1] + 1 if runs and runs[-1][0] == value else 1))
    return list(runs)


def function(draw: random.Random) -> str:
    """Return signature and docstring of a function, with examples of what it returns."""
    numbers = draw.random() < 0.5
    which, keeps = draw.choice(list((NUMBERS if numbers else WORDS).items()))
    change, changed = draw.choice(list((MAPPED if numbers else SPELT).items()))
    result, collected = draw.choice(list(RESULTS.items()))
    how = f"replace each by its {change}" if numbers else f"write each {change}"
    argument = draw.choice(("numbers", "values", "data") if numbers else ("words", "texts", "terms"))
    kind = "integers" if numbers else "words"
    name = re.sub(r"\W+", "_", f"{draw.choice(('select', 'process', 'get'))} {which} {change}")
    lines = [
        f"def {name}({argument}: list[{'int' if numbers else 'str'}]):",
        '    """',
        "    "
        + draw.choice(PHRASES).format(
            which=f"{which} ones" if numbers else which,
            kind=kind,
            how=how,
            cap=how.capitalize(),
            result=result,
        ),
    ]
    for _ in range(draw.randint(1, 3)):
        size = draw.randint(3, 7)
        given = [draw.randint(-20, 120) for _ in range(size)] if numbers else draw.choices(VOCABULARY, k=size)
        lines += [f"    >>> {name}({given!r})", f"    {collected([changed(x) for x in given if keeps(x)])!r}"]
    return "\n".join((*lines, '    """', ""))


@cache
def library_functions() -> list[str]:
    """Return signature and docstring of functions of this Python's standard library."""
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {
        "site-packages",
        "dist-packages",
        "test",
        "tests",
        "idlelib",
        "lib2to3",
        "turtledemo",
        "ensurepip",
    }
    found = []
    for file in sorted(root.rglob("*.py")):
        if left_out.isdisjoint(file.relative_to(root).parts):
            with warnings.catch_warnings(action="ignore"):
                try:
                    body = ast.parse(file.read_bytes()).body
                except SyntaxError:  # an example of what older versions took
                    continue
            found += [_without_body(node) for node in body if isinstance(node, ast.FunctionDef)]
    return list(different(text for text in found if text))


def _without_body(node: ast.FunctionDef) -> str:
    """Return a function with its docstring alone; nothing if that is too short or too long."""
    text = ast.get_docstring(node) or ""
    if not 60 <= len(text) <= 700:
        return ""
    node.decorator_list, node.body = [], node.body[:1]
    return ast.unparse(node) + "\n"
