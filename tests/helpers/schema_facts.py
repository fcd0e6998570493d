"""Facts of JSON schemas: of each keyword and format, what fulfils it and what does not."""

TREE = {"type": "object", "properties": {"sub": {"type": "array", "items": {"$ref": "#"}}}}
PET = {
    "oneOf": [
        {"type": "object", "properties": {"kind": {"const": "cat"}, "n": {"type": "integer"}}},
        {"type": "object", "properties": {"kind": {"const": "dog"}, "s": {"type": "string"}}},
    ]
}
for _one in PET["oneOf"]:
    _one["required"] = ["kind"]

FACTS = {
    "type": [
        ({"type": "integer"}, [3, -1, 0], [1.5, "3", None, True, []]),
        ({"type": ["null", "string"]}, [None, "x"], [1, False]),
        ({"type": "number"}, [1, -2.5], ["1"]),
    ],
    "enum": [
        ({"enum": ["red", 7, None, [1, {"a": "b"}]]}, ["red", 7, None, [1, {"a": "b"}]], ["re", 8]),
        ({"enum": ['\n"ü', "/"]}, ['\n"ü', "/"], ["ü"]),
        ({"enum": [1, "a", 2.5], "type": "integer"}, [1], ["a", 2.5]),
        ({"enum": ["a", "b"], "const": "b"}, ["b"], ["a"]),
    ],
    "const": [({"const": {"x": 1}}, [{"x": 1}], [{}, {"x": 2}]), ({"const": 3.0}, [3], [4])],
    "minLength": [({"type": "string", "minLength": 2}, ["éé", "abc"], ["", "é"])],
    "maxLength": [({"type": "string", "maxLength": 2.0}, ["", "é\U0001f600"], ["abc"])],
    "pattern": [
        ({"type": "string", "pattern": "b+"}, ["abc", "bb"], ["ac", ""]),
        ({"type": "string", "pattern": "^a|z$"}, ["ab", "yz"], ["ba", "zy"]),
        ({"type": "string", "pattern": "^\\d+$", "maxLength": 2}, ["12"], ["", "123"]),
    ],
    "format": [
        (
            {"type": "string", "format": "date", "pattern": "^2"},
            ["2024-02-29"],
            ["1999-01-01", "2023-02-29", "today"],
        )
    ],
    "minimum": [
        ({"type": "integer", "minimum": -2}, [-2, 9], [-3]),
        ({"type": "number", "minimum": 0.5, "exclusiveMinimum": True}, [0.6], [0.5]),
    ],
    "maximum": [({"type": "number", "maximum": 1.5}, [1.5, -1], [1.6, 2])],
    "exclusiveMinimum": [({"type": "integer", "exclusiveMinimum": 3}, [4], [3])],
    "exclusiveMaximum": [({"type": "number", "exclusiveMaximum": 3}, [2.9], [3, 3.1])],
    "multipleOf": [({"type": "integer", "multipleOf": 7}, [0, 49, -7], [8])],
    "items": [
        ({"type": "array", "items": {"type": "null"}}, [[], [None, None]], [[1]]),
        (
            {"type": "array", "items": [{"type": "null"}], "additionalItems": {"type": "boolean"}},
            [[None, True]],
            [[True], [None, 1]],
        ),
    ],
    "additionalItems": [({"items": [{}], "additionalItems": False}, [[1]], [[1, 2]])],
    "prefixItems": [
        ({"type": "array", "prefixItems": [{"const": 1}], "items": False}, [[], [1]], [[2], [1, 1]])
    ],
    "minItems": [({"type": "array", "minItems": 2}, [[1, 2], [1, 2, 3]], [[1]])],
    "maxItems": [({"type": "array", "maxItems": 1}, [[], [1]], [[1, 2]])],
    "properties": [
        (
            {"type": "object", "properties": {"a": {"type": "integer"}}},
            [{}, {"a": 1}, {"a": 1, "b": 2}],
            [{"a": "x"}],
        )
    ],
    "required": [({"type": "object", "required": ["a", "b"]}, [{"a": 1, "b": 2}], [{"a": 1}, {}])],
    "additionalProperties": [
        ({"properties": {"a": {}}, "additionalProperties": False}, [{"a": 1}, {}], [{"b": 1}]),
        ({"type": "object", "additionalProperties": {"type": "null"}}, [{"x": None}], [{"x": 1}]),
    ],
    "patternProperties": [
        (
            {
                "type": "object",
                "patternProperties": {"^n_": {"type": "integer"}},
                "additionalProperties": False,
            },
            [{"n_a": 1}],
            [{"n_a": "x"}, {"m": 1}],
        )
    ],
    "propertyNames": [
        ({"type": "object", "propertyNames": {"type": "string"}}, [{"a": 1}, {}], [1]),
        (
            {
                "type": "object",
                "propertyNames": {"$ref": "#/$defs/c"},
                "additionalProperties": {"type": "null"},
                "$defs": {"c": {"enum": ["a", "b"], "type": "string", "title": "C"}},
            },
            [{}, {"a": None}, {"a": None, "b": None}],
            [{"c": None}, {"a": 1}],
        ),
        (
            {"propertyNames": {"enum": ["a", "b"]}, "required": ["b"], "type": "object"},
            [{"b": 1}, {"a": [], "b": {}}],
            [{}, {"a": 1}, {"b": 1, "c": 1}],
        ),
        ({"type": "object", "propertyNames": {"pattern": "^a"}}, [{"ab": 1}, {}], [{"b": 1}]),
        (
            {"propertyNames": {"minLength": 2, "maxLength": 3}, "type": "object"},
            [{"éa": 1}, {"abc": 1}, {'"\n': 2}],
            [{"a": 1}, {"": 1}, {"abcd": 1}],
        ),
    ],
    "minProperties": [
        ({"type": "object", "minProperties": 1}, [{"a": 1}], [{}]),
        ({"required": ["a", "b"], "minProperties": 2}, [{"a": 1, "b": 1}], [{"a": 1}]),
    ],
    "maxProperties": [({"type": "object", "maxProperties": 1}, [{}, {"a": 1}], [{"a": 1, "b": 1}])],
    "anyOf": [
        ({"anyOf": [{"type": "integer", "minimum": 5}, {"type": "null"}]}, [5, None], [4, ""])
    ],
    "oneOf": [
        ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, [1, "x"], [None]),
        ({"oneOf": [{"const": 1}, {"const": 2}]}, [1, 2], [3]),
        (
            PET,
            [{"kind": "cat", "n": 1}, {"kind": "dog", "s": "x"}],
            [{"kind": "cat", "n": "x"}, {}],
        ),
    ],
    "allOf": [
        ({"allOf": [{"type": "integer", "minimum": 2}, {"maximum": 4}]}, [2, 4], [1, 5, "x"]),
        (
            {
                "allOf": [
                    {"properties": {"a": {"type": "null"}}, "required": ["a"]},
                    {"properties": {"b": {"type": "null"}}},
                ],
                "type": "object",
            },
            [{"a": None}, {"a": None, "b": None}],
            [{}, {"a": 1}, {"a": None, "b": 1}],
        ),
    ],
    "$ref": [
        (TREE, [{}, {"sub": [{}, {"sub": []}]}], [{"sub": [1]}, {"sub": {}}]),
        ({"$ref": "#/$defs/a~1b%25", "$defs": {"a/b%": {"type": "null"}}}, [None], [1]),
        (
            {"$ref": "#/definitions/x", "maxLength": 1, "definitions": {"x": {"type": "string"}}},
            ["a"],
            ["ab", 1],
        ),
        (
            {"properties": {"a": {"type": "null"}, "b": {"$ref": "#/properties/a"}}},
            [{"a": None, "b": None}],
            [{"b": 1}],
        ),
    ],
}
"""Of each keyword that is held: schemas, values that fulfil them, and values that do not."""


FORMAT_FACTS = {
    "date": (
        ["2024-02-29", "1999-12-31", "2000-02-29"],
        [
            "2023-02-29",
            "1900-02-29",
            "2024-13-01",
            "2024-04-31",
            "24-01-01",
            "0000-01-01",
            "2024-1-1",
        ],
    ),
    "time": (["23:59:59Z", "00:00:00.5+01:30"], ["24:00:00Z", "12:00:60Z", "12:00Z", "12:00:00"]),
    "date-time": (
        ["2024-02-29T12:00:00Z"],
        [
            "2023-02-29T12:00:00Z",
            "2024-02-29 12:00:00Z",
            "2024-02-29T12:00:00",
            "1998-12-31T23:58:60Z",
        ],
    ),
    "duration": (["P3Y6M4DT12H", "PT5S", "P2W"], ["P", "PT", "P1W2D", "3D", "P1S", "P1Y2D"]),
    "email": (
        ["a.b+c@example.org"],
        ["a", "a@", "@b.c", "a..b@c.de", ".a@b.cd", "a b@c.de", "x" * 65 + "@b.cd"],
    ),
    "hostname": (
        ["example.org", "a-b.c1", "x" * 63],
        ["-a", "a-", "a..b", "a_b", "x" * 64, "a--b"],
    ),
    "ipv4": (["127.0.0.1", "255.255.255.255"], ["256.0.0.1", "1.2.3", "01.2.3.4", "1.2.3.4.5"]),
    "ipv6": (
        ["::1", "::", "2001:db8::8a2e:7", "1:2:3:4:5:6:7:8", "1::"],
        ["1::2::3", ":::", "1:2", "12345::", "1:2:3:4:5:6:7:8:9", "g::"],
    ),
    "uuid": (
        ["2eb8aa08-aa98-11ea-b4aa-73b441d16380"],
        ["2eb8aa08", "2eb8aa08aa9811eab4aa73b441d16380", "2eb8aa08-aa98-11ea-b4aa-73b441d1638g"],
    ),
    "uri": (
        ["https://example.org/a?b=c#d", "mailto:a@b.cd", "urn:x:y"],
        [
            "//a.b",
            "/a",
            "a",
            "http:// x",
            "http://a b",
            "http://a/<",
            "http:",
            "http://",
            "a:%zz",
            ":a",
        ],
    ),
}

WRONG = {
    '{"type": "any"}': "#/type must be one of null",
    '{"type": ["string", 1]}': "#/type must be one of",
    '{"required": true}': "#/required must be a list of names",
    '{"properties": {"a": {"required": true}}}': "#/properties/a/required must be",
    '{"properties": []}': "#/properties must be an object",
    '{"properties": {"a": 1}}': "#/properties/a must be a schema",
    '{"anyOf": []}': "#/anyOf must be a list of one schema",
    '{"enum": "a"}': "#/enum must be a list",
    '{"maxLength": -1}': "#/maxLength must be a whole number",
    '{"minItems": 1.5}': "#/minItems must be a whole number",
    '{"minItems": 1e9}': "#/minItems must be a whole number from 0 to 1048576",
    '{"minProperties": 2, "type": "object"}': "#/minProperties cannot be held",
    '{"multipleOf": 0}': "#/multipleOf must be above 0",
    '{"exclusiveMinimum": true}': "#/exclusiveMinimum must be a number",
    '{"maximum": 9007199254740993}': "#/maximum must be a number from -2^53 to 2^53",
    '{"minimum": -1e300}': "#/minimum must be a number",
    '{"multipleOf": 9007199254740994}': "#/multipleOf must be a number",
    '{"items": {"const": 9007199254740993}}': "#/items/const must be without 9007199254740993",
    '{"enum": [[{"a": 1234567890123456789}]]}': "#/enum must be without 1234567890123456789",
    '{"items": {"const": -9223372036854775808}}': "#/items/const must be without -92233720",
    '{"items": {"enum": [0.1, 123456789.12345679]}}': "#/items/enum must be without 123456789.1234",
    '{"maximum": 0.30000000000000004}': "#/maximum must have at most 15 digits",
    '{"pattern": "^(?!a)"}': "#/pattern must be a regular expression that can be held",
    '{"pattern": "["}': "#/pattern must be a regular expression",
    '{"patternProperties": {"(": {}}}': "#/patternProperties must be a regular expression",
    '{"format": "unknown"}': "#/format must be left out or one of date",
    '{"type": "integer", "format": "int32"}': "#/format must be left out",
    '{"const": "a\\u0000b"}': "#/const must be without control characters",
    '{"properties": {"\\u0001": {}}}': "#/properties must be without control characters",
    '{"$ref": "#/$defs/a"}': "#/$defs/a is referred to and is not there",
    '{"$ref": "#a"}': '#/$ref must be "#" or begin with',
    '{"$ref": "https://example.org/x"}': '#/$ref must be "#" or begin',
    '{"items": {"$id": "x"}}': "#/items/$id must be left out",
    '{"oneOf": [{"type": "integer"}, {"type": "number"}]}': "#/oneOf must be of schemas that",
    '{"oneOf": [{}, {"type": "null"}]}': "#/oneOf must be of schemas that no value",
}
"""Schemas as JSON that are refused, and how the reason begins."""
