-- Reading arguments one after the other; `position` is the last one that was read.

local position

local function text()
  position = position + 1
  return ARGV[position]
end

local function number()
  return tonumber(text())
end

-- A list with its length before it.
local function list()
  local values = {}
  for index = 1, number() do values[index] = text() end
  return values
end
