"""Tools and schemas as clients send them."""


def tool(name="f", parameters=None, strict=True):
    function = {"name": name, "parameters": parameters, **({"strict": True} if strict else {})}
    return {"type": "function", "function": function}


def record(properties, *required, **more):
    return {"type": "object", "properties": properties, "required": list(required), **more}


LOOSE = tool("run", strict=False)
