"""JSON schemas drawn at random: short ones with a test of their own, and ones of every keyword."""

import random

DEEPEST = 3
TEXTS = ["red", 7, None, "ein \u00fc", False, -1.5]


class Schemas:
    """Draws schemas whose values are short enough for a model that draws at random.

    Types, bounds, enums, lists and objects in one another, properties that may be left out,
    alternatives, and definitions that are referred to.
    """

    def __init__(self, rng):
        self._rng = rng
        self._shared = {}

    def draw(self):
        """A schema and its test."""
        self._shared = {}
        schema, fits = self._any(0)
        if self._shared:
            schema = schema | {"$defs": {name: part for name, (part, _) in self._shared.items()}}
        return schema, fits

    def _any(self, depth):
        kinds = [self._integer, self._number, self._plain, self._enum, self._text]
        if depth < DEEPEST:
            kinds += [self._list, self._object, self._object, self._either, self._reference]
        return kinds[self._rng.integers(len(kinds))](depth)

    def _integer(self, _):
        low, high = self._bounds()
        return {"type": "integer", "minimum": low, "maximum": high}, (
            lambda value: type(value) is int and low <= value <= high
        )

    def _number(self, _):
        low, high = self._bounds()
        return {"type": "number", "minimum": low, "exclusiveMaximum": high + 1}, (
            lambda value: type(value) in (int, float) and low <= value < high + 1
        )

    def _plain(self, _):
        if self._rng.random() < 0.5:
            return {"type": "boolean"}, lambda value: type(value) is bool
        return {"type": ["null", "boolean"]}, (lambda value: value is None or type(value) is bool)

    def _enum(self, _):
        values = TEXTS[: self._rng.integers(1, len(TEXTS) + 1)]
        if self._rng.random() < 0.3:
            return {"const": values[-1]}, lambda value: is_one_of(value, values[-1:])
        return {"enum": values}, lambda value: is_one_of(value, values)

    def _text(self, _):
        low, high = sorted(int(one) for one in self._rng.integers(0, 6, 2))
        if self._rng.random() < 0.3:
            return {"type": "string", "pattern": f"^[ab]{{{low},{high}}}$"}, (
                lambda value: (
                    isinstance(value, str)
                    and low <= len(value) <= high
                    and set(value) <= {"a", "b"}
                )
            )
        return {"type": "string", "minLength": low, "maxLength": high}, (
            lambda value: isinstance(value, str) and low <= len(value) <= high
        )

    def _list(self, depth):
        items, fits = self._any(depth + 1)
        low, high = sorted(int(one) for one in self._rng.integers(0, 4, 2))
        return {"type": "array", "items": items, "minItems": low, "maxItems": high}, (
            lambda value: (
                isinstance(value, list) and low <= len(value) <= high and all(map(fits, value))
            )
        )

    def _object(self, depth):
        names = list("abcd"[: self._rng.integers(0, 4)])
        parts = {name: self._any(depth + 1) for name in names}
        required = [name for name in names if self._rng.random() < 0.6]
        schema = {
            "type": "object",
            "properties": {name: part for name, (part, _) in parts.items()},
            "required": required,
            "additionalProperties": False,
        }
        return (
            schema,
            lambda value: (
                isinstance(value, dict)
                and list(value) == [name for name in names if name in value]  # in their order
                and set(required) <= set(value)
                and all(parts[name][1](one) for name, one in value.items())
            ),
        )

    def _either(self, depth):
        parts = [self._any(depth + 1) for _ in range(self._rng.integers(2, 4))]
        return {"anyOf": [part for part, _ in parts]}, (
            lambda value: any(fits(value) for _, fits in parts)
        )

    def _reference(self, depth):
        """One that there is, or a new one; it may be referred to again from anywhere."""
        if not self._shared or self._rng.random() < 0.5:
            part = self._any(depth + 1)
            self._shared[f"part{len(self._shared)}"] = part
        names = list(self._shared)
        name = names[self._rng.integers(len(names))]
        return {"$ref": f"#/$defs/{name}"}, self._shared[name][1]

    def _bounds(self):
        return sorted(int(one) for one in self._rng.integers(-1000, 1000, 2))


def is_one_of(value, values):
    """JSON's equality: false is not 0."""
    return any(value == one and (type(value) is bool) == (type(one) is bool) for one in values)


class RandomSchemas:
    """Draws schemas of all keywords that are held, some of which contradict themselves."""

    def __init__(self, seed):
        self.rng = random.Random(seed)

    def schema(self):
        return self._any(0) | {"$defs": {"p": self._any(1), "q": self._any(2)}}

    def _any(self, depth):
        flat = [self._integer, self._number, self._text, self._values]
        deep = [self._list, self._object, self._object, self._choice, self._all, self._reference]
        return self.rng.choice(flat + (deep if depth < 3 else []))(depth)

    def _some(self, likely, **parts):
        return {name: draw() for name, draw in parts.items() if self.rng.random() < likely}

    def _bounds(self):
        def draw():
            return self.rng.choice([self.rng.randint(-20, 20), round(self.rng.uniform(-5, 5), 2)])

        names = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
        return self._some(0.3, **dict.fromkeys(names, draw))

    def _integer(self, _):
        steps = self._some(0.3, multipleOf=lambda: self.rng.choice([2, 7, 0.5]))
        return {"type": "integer"} | self._bounds() | steps

    def _number(self, _):
        return {"type": "number"} | self._bounds()

    def _text(self, _):
        return {"type": "string"} | self._some(
            0.3,
            minLength=lambda: self.rng.randint(0, 4),
            maxLength=lambda: self.rng.randint(0, 6),
            pattern=lambda: self.rng.choice(["^a", "b$", "a|b", "^(x|y)*$", "[0-9]{2}", "^$"]),
            format=lambda: self.rng.choice(["date", "ipv4", "time"]),
        )

    def _values(self, _):
        values = [1, 2.5, "a", 'b"c', None, True, [1, 2], {"x": 1}, "é", -3]
        return {"enum": self.rng.sample(values, self.rng.randint(1, 4))}

    def _list(self, depth):
        return {
            "type": "array",
            "items": self._any(depth + 1),
            "maxItems": self.rng.randint(0, 3),
        } | self._some(
            0.3,
            prefixItems=lambda: [self._any(depth + 1)],
            minItems=lambda: self.rng.randint(0, 2),
        )

    def _object(self, depth):
        names = self.rng.sample(["a", "b", 'd"', "é"], self.rng.randint(0, 3))
        required = [one for one in [*names, "zz"] if self.rng.random() < 0.4]
        return {
            "type": "object",
            "properties": {name: self._any(depth + 1) for name in names},
            "required": required,
            "additionalProperties": self.rng.choice([False, self._any(depth + 1)]),
        } | self._some(0.2, maxProperties=lambda: self.rng.randint(0, 3))

    def _choice(self, depth):
        return {"anyOf": [self._any(depth + 1) for _ in range(self.rng.randint(1, 3))]}

    def _all(self, depth):
        return {"allOf": [self._any(depth + 1) for _ in range(self.rng.randint(1, 2))]}

    def _reference(self, _):
        return {"$ref": self.rng.choice(["#", "#/$defs/p", "#/$defs/q"])}
