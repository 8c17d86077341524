-- Facts that are tables, and the order of strings and of waiters.

local RANK = 2 ^ 50                     -- score in a line = rank * RANK + place, exact in a double
local tables = {}

-- A fact that is a table, false if absent. Whoever changes the table sets it again.
local function record(field)
  local value = tables[field]
  if value == nil then
    local packed = fact(field)
    value = packed and decode(packed)
    tables[field] = value
  end
  return value
end

local function set_record(field, value)
  tables[field] = value
  set_fact(field, value and pack(value))
end

-- Whether a string comes before another by its bytes; the `<` of the server follows its locale.
local function before(one, other)
  local length = min(#one, #other)
  for index = 1, length do
    local a, b = one:byte(index), other:byte(index)
    if a ~= b then return a < b end
  end
  return #one < #other
end

-- The order of waiters, each with its key, line and id.
local function in_order(one, other)
  if one.key ~= other.key then return one.key < other.key end
  return before(one.line .. "\31" .. one.waiter, other.line .. "\31" .. other.waiter)
end
