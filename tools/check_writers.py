"""Checks that a struct which several functions share is written by few, all of them its own.

clang-tidy finds the writes (its checks that are AST queries), in the pass that tools/tidy.py makes. Counted is a write
to a public field of an object that was reached through a reference, a pointer or a global: it is assigned, counted up,
changed by a method of a foreign class that is not const, or given to a function as a reference that is not const. A
field inside of a field is a write to the outermost object. Not counted are what a function does to an object of its own
(a local, a value that it was given, what is inside of either), and a field of a class of the project's that changes by
its own methods.

A function is a struct's own if it is in the header that defines it or in a source of that name of the same layer, or is
a method of a class that is defined there or has the struct inside. tools/writers.txt lists what is beyond LIMITS, and
only shrinks.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
LIMITS = {"writers": 8, "outside": 0}  # functions that write a struct; those that are not its own
CHECKS = "custom-writes-"
# Methods that are const for what is const, and hand out what is inside. A lock is no state.
READS = ("at", "back", "front", "begin", "end", "find", "data", "value", "get", "lock", "unlock")
INSIDE = ("at", "back", "front", "value", "emplace_back")
POINTERS = (
    "::std::shared_ptr",
    "::std::unique_ptr",
    "::std::__shared_ptr_access",
    "::c10::intrusive_ptr",
)
BY_OPERATOR = "ignoringParenImpCasts(cxxOperatorCallExpr())"
LINE = re.compile(
    r"(?P<file>/[^:\n]+):(?P<line>\d+):(?P<column>\d+): (?P<kind>error|warning|note): (?P<text>.*)"
)


def quoted(names: Iterable[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)


def either(*matchers: str) -> str:
    return f"anyOf({', '.join(matchers)})"


def without_casts(matcher: str) -> str:
    return f"ignoringParenImpCasts({matcher})"


def pointer_type() -> str:
    of = f"hasDeclaration(namedDecl(hasAnyName({quoted(POINTERS)})))"
    return f"hasType(hasUnqualifiedDesugaredType(recordType({of})))"


def parts_of(whole: str) -> Iterator[str]:
    """Matchers of what is inside of an object: its member or element, and a local name for it."""
    whole = without_casts(whole)
    direct = either("unless(isArrow())", f"hasObjectExpression({BY_OPERATOR})")
    yield f"memberExpr({direct}, hasObjectExpression({whole}))"
    yield (
        f'cxxOperatorCallExpr(hasAnyOverloadedOperatorName("[]", "*", "->"), hasArgument(0, {whole}), '
        f"unless(hasArgument(0, expr({pointer_type()}))))"
    )
    yield f"cxxMemberCallExpr(on({whole}), callee(cxxMethodDecl(hasAnyName({quoted(INSIDE)}))))"
    looped = f"hasParent(declStmt(hasParent(cxxForRangeStmt(hasRangeInit({whole})))))"
    named = f"varDecl(unless(parmVarDecl()), hasType(referenceType()), {either(f'hasInitializer({whole})', looped)})"
    yield f"declRefExpr(to({named}))"


def queries() -> list[str]:
    """Of clang-query, one for each form of a write."""
    outer = "optionally(hasDeclContext(cxxRecordDecl().bind('outer')))"
    field = f"fieldDecl(isPublic(), hasParent(cxxRecordDecl({outer}).bind('struct')))".replace(
        "'", '"'
    )
    shared = (
        "declRefExpr(to(parmVarDecl(hasType(referenceType()))))",
        "declRefExpr(to(varDecl(hasGlobalStorage())))",
        "callExpr(unless(cxxOperatorCallExpr()), unless(cxxMemberCallExpr()))",
        'unaryOperator(hasOperatorName("*"))',
        f'cxxOperatorCallExpr(hasAnyOverloadedOperatorName("*", "->"), hasArgument(0, expr({pointer_type()})))',
    )
    pointed = f"allOf(isArrow(), unless(hasObjectExpression({BY_OPERATOR})))"
    reached = either(pointed, f"hasObjectExpression({without_casts(either(*shared))})")
    first = f"memberExpr(member({field}), {reached})"
    lets = [f"let level0 expr({first})"]
    for depth in range(1, 6):
        lets.append(f"let level{depth} expr({either(first, *parts_of(f'level{depth - 1}'))})")
    target = without_casts("level5")
    method = 'optionally(cxxMethodDecl(ofClass(cxxRecordDecl().bind("class"))))'
    named = (
        f"functionDecl(unless(isDefaulted()), unless(cxxMethodDecl(ofClass(isLambda()))), {method})"
    )
    by = f'hasAncestor({named}.bind("function"))'
    reference = "parmVarDecl(hasType(referenceType(pointee(unless(isConstQualified())))))"
    ours = 'cxxRecordDecl(isExpansionInFileMatching("/csrc/"))'
    changes = f"cxxMethodDecl(unless(isConst()), unless(hasAnyName({quoted(READS)})), unless(ofClass({ours})))"
    plain = f"expr(level5, unless(hasType(hasUnqualifiedDesugaredType(recordType(hasDeclaration({ours}))))))"
    forms = (
        f"binaryOperation(isAssignmentOperator(), hasLHS({target}), {by})",
        f'unaryOperator(hasAnyOperatorName("++", "--"), hasUnaryOperand({target}), {by})',
        f'cxxOperatorCallExpr(hasAnyOverloadedOperatorName("++", "--"), hasArgument(0, {target}), {by})',
        f"cxxMemberCallExpr(on({target}), callee({changes}), {by})",
        f"callExpr(unless(cxxOperatorCallExpr()), forEachArgumentWithParam({without_casts(plain)}, {reference}), {by})",
    )
    return ["\n".join([*lets, f'match {form}.bind("write")']) for form in forms]


def options(tidy: dict[str, object]) -> dict[str, object]:
    """Options of clang-tidy that have these checks too; what they find is no finding of clang-tidy's."""
    nodes = {
        "write": "Warning",
        "struct": "Note",
        "outer": "Note",
        "function": "Note",
        "class": "Note",
    }
    shown = [{"BindName": node, "Message": node, "Level": level} for node, level in nodes.items()]
    checks = [
        {"Name": f"{CHECKS.removeprefix('custom-')}{i}", "Query": query, "Diagnostic": shown}
        for i, query in enumerate(queries())
    ]
    return tidy | {
        "Checks": f"{tidy['Checks']},{CHECKS}*",
        "WarningsAsErrors": f"{tidy.get('WarningsAsErrors', '')},-{CHECKS}*",
        "CustomChecks": checks,
    }


class Place(NamedTuple):
    """Where a declaration begins."""

    file: Path
    line: int
    column: int

    def text(self) -> str:
        lines = self.file.read_text().splitlines()[self.line - 1 :]
        return " ".join([lines[0][self.column - 1 :], *lines[1:10]])


class Write(NamedTuple):
    """Of a struct, which may be in an outer one, by a function, which may be a method of a class."""

    struct: Place
    outer: Place | None
    function: Place
    of_class: Place | None


def writes_in(output: str) -> tuple[set[Write], str]:
    """What these checks have found by what clang-tidy printed, and the rest of that."""
    writes: set[Write] = set()
    rest: list[str] = []
    ours: dict[str, Place] | None = None  # the nodes of the write that is being read

    def end() -> None:
        if ours is not None:
            writes.add(
                Write(ours["struct"], ours.get("outer"), ours["function"], ours.get("class"))
            )

    for line in output.splitlines(keepends=True):
        if found := LINE.match(line):
            if found["kind"] != "note":
                end()
                ours = {} if f"[{CHECKS}" in line else None
            elif ours is not None:
                place = Place(Path(found["file"]), int(found["line"]), int(found["column"]))
                ours.setdefault(found["text"], place)
        if ours is None:
            rest.append(line)
    end()
    return writes, "".join(rest)


def type_name(place: Place) -> str:
    head = re.split(r"[{;]|(?<!:):(?!:)", place.text())[0].replace(" final", "")
    return head.split()[-1]


def function_name(place: Place) -> str:
    return place.text().split("(")[0].split()[-1].lstrip("*&")


def is_of(file: Path, of: Path, csrc: Path) -> bool:
    """Whether a file is that header, or a source of its name in its layer; or the header is it."""

    def layer(path: Path) -> str:
        return path.relative_to(csrc).as_posix().removeprefix("include/brimful/").split("/")[0]

    return file == of or (file.stem == of.stem and layer(file) == layer(of))


def is_own(write: Write, csrc: Path) -> bool:
    places = [write.function] if write.of_class is None else [write.function, write.of_class]
    return write.of_class in (write.struct, write.outer or write.struct) or any(
        is_of(place.file, write.struct.file, csrc) for place in places
    )


def by_struct(writes: Iterable[Write], csrc: Path) -> dict[str, dict[str, bool]]:
    """For each struct the functions that write it, and whether each is its own."""
    found: dict[str, dict[str, bool]] = defaultdict(dict)
    for write in sorted(writes, key=lambda write: (write.struct, write.function)):
        if not write.struct.file.is_relative_to(csrc) or not write.function.file.is_relative_to(
            csrc
        ):
            continue
        name = type_name(write.struct)
        if write.outer is not None and "::" not in name:
            name = f"{type_name(write.outer)}::{name}"
        struct = f"{write.struct.file.relative_to(csrc.parent)} {name}"
        where = f"{write.function.file.relative_to(csrc.parent)}:{write.function.line}"
        found[struct][f"{where} {function_name(write.function)}"] = is_own(write, csrc)
    return found


def problems(writes: Iterable[Write], csrc: Path = ROOT / "csrc") -> list[str]:
    listed: dict[str, int] = {}
    file = csrc.parent / "tools" / "writers.txt"
    for line in file.read_text().splitlines() if file.exists() else ():
        if line and not line.startswith("#"):
            what, number = line.rsplit(None, 1)
            listed[what] = int(number)
    found = []
    for struct, functions in by_struct(writes, csrc).items():
        numbers = {"writers": len(functions), "outside": list(functions.values()).count(False)}
        for kind, number in numbers.items():
            if number <= LIMITS[kind]:
                continue
            what = f"{kind} {struct}"
            allowed = listed.pop(what, LIMITS[kind])
            if number > allowed:
                names = [name for name, own in functions.items() if kind == "writers" or not own]
                found.append(
                    f"{what}: {number} are too many (at most {allowed}): {', '.join(names)}"
                )
            elif number < allowed:
                found.append(
                    f"{what}: has shrunk to {number}; say so in tools/writers.txt ({allowed})"
                )
    return found + [f"{what}: needs no line in tools/writers.txt any more" for what in listed]
