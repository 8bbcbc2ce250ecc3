"""Add an entry to a mapping of `params.yaml` as text: every other byte, including comments and layout, is unchanged."""

import yaml

from dml_core.errors import ConfigError


def with_entry(text: str, keys: tuple[str, ...], entry: list[str]) -> str:
    """Return the file's text with an entry added at the end of a mapping.

    Args:
        keys: keys that lead from the top to the mapping, which exists.
        entry: the entry's lines without the mapping's indentation.

    Raises:
        ConfigError: the mapping is empty or written in braces, so no line can be added.
    """
    mapping = _mapping(yaml.compose(text, Loader=yaml.SafeLoader), keys)
    if mapping.flow_style or not mapping.value:
        raise ConfigError(f"'{'.'.join(keys)}' is written in braces; write each entry on a separate line, so that another can be added")
    margin = mapping.value[0][0].start_mark.column
    newline = "\r\n" if "\r\n" in text else "\n"
    lines = text.splitlines(keepends=True)
    end = _after_comments(lines, _last_line(mapping) + 1, margin)
    if not lines[end - 1].endswith(newline):
        lines[end - 1] += newline
    return "".join([*lines[:end], *(f"{' ' * margin}{line}{newline}" for line in entry), *lines[end:]])


def _mapping(node: yaml.Node | None, keys: tuple[str, ...]) -> yaml.MappingNode:
    for key in keys:
        assert isinstance(node, yaml.MappingNode)
        node = next(value for name, value in node.value if name.value == key)
    assert isinstance(node, yaml.MappingNode)
    return node


def _last_line(node: yaml.Node) -> int:
    """Return the line that a value ends on. A block's end mark is where the next node begins, so the end of its last part is used."""
    if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        return _last_line(last[1] if isinstance(last, tuple) else last)
    return node.end_mark.line - (node.end_mark.column == 0)


def _after_comments(lines: list[str], line: int, margin: int) -> int:
    """Return the line after the comments that belong to the last entry: those below it with at least its indentation."""
    while line < len(lines) and lines[line].lstrip().startswith("#") and len(lines[line]) - len(lines[line].lstrip()) >= margin:
        line += 1
    return line
