"""Keywords of JSON schemas that say nothing of a value, and those that no grammar holds.

`read_schema.HELD` are the others. docs/serving.md has the three as a table.
"""

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")

SAYS_NOTHING = frozenset(
    {
        *("$schema", "$vocabulary", "$comment", "$anchor", "$defs", "definitions"),
        *("title", "description", "markdownDescription", "enumNames", "enumDescriptions"),
        *("default", "example", "examples", "deprecated", "readOnly", "writeOnly"),
        *("contentEncoding", "contentMediaType", "contentSchema"),
        *("externalDocs", "xml", "discriminator"),
    }
)
"""They describe a schema, or hold what others refer to; so do those that begin with x-."""

REFUSED = frozenset(
    {
        *("not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems"),
        *("dependencies", "dependentRequired", "dependentSchemas"),
        *("unevaluatedItems", "unevaluatedProperties"),
        *("$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor"),
        *("disallow", "divisibleBy", "extends", "nullable", "x-guidance"),
    }
)
"""They would say something of a value."""

WAYS_OUT = {
    "nullable": 'must be left out; use {"type": [..., "null"]}',
    "divisibleBy": "must be left out; use multipleOf",
    "extends": "must be left out; use allOf",
    "if": "cannot be held; use anyOf",
    "dependentSchemas": "cannot be held; use anyOf",
}
"""What is said of some of them."""
