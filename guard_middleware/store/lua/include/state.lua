--[[
  The clock, and the small facts in one hash. Every script begins with this.
  A script is run from its first line each time, so that each function that it makes costs as much as a third of a
  command. That is why the common case of `admit` and `finish` stands before most includes, and why what is needed only
  if somebody waits is made at first use.
]]

local call = redis.call
local floor, min, max = math.floor, math.min, math.max
local pack, decode = cmsgpack.pack, cmsgpack.unpack

local root = KEYS[1]
local STATE = root .. "state"
local BACKGROUND = 3                    -- the last rank: it may not touch the reserve
local CHUNK = 100                       -- never unpack more than this

-- I6: one clock, the server's; it stands still until the end of the script.
local now = tonumber(ARGV[1])
local injected = now ~= nil
if not injected then
  local time = call("TIME")
  now = time[1] * 1000 + floor(time[2] / 1000)
end

-- Facts are read through and written back once, at the end: field -> value, false if there is none.
local facts, records, changed = {}, {}, {}

local function prefetch(fields)
  local values = call("HMGET", STATE, unpack(fields))
  for index = 1, #fields do facts[fields[index]] = values[index] end
end

local function fact(field)
  local value = facts[field]
  if value == nil then
    value = call("HGET", STATE, field)
    facts[field] = value
  end
  return value
end

-- Remember a fact; false removes it.
local function set_fact(field, value)
  facts[field] = value
  changed[field] = true
end

-- A fact that is a table. Whoever changes the table sets it again.
local function record(field)
  local value = records[field]
  if value == nil then
    local packed = fact(field)
    value = packed and decode(packed)
    records[field] = value
  end
  return value
end

local function flush()
  local written, removed = {}, nil
  for field in pairs(changed) do
    local value = facts[field]
    if value == false then
      removed = removed or {}
      removed[#removed + 1] = field
    else
      written[#written + 1] = field
      written[#written + 1] = value
      if #written >= CHUNK then
        call("HSET", STATE, unpack(written))
        written = {}
      end
    end
  end
  if #written > 0 then call("HSET", STATE, unpack(written)) end
  if removed then
    for _, field in ipairs(removed) do call("HDEL", STATE, field) end
  end
end
