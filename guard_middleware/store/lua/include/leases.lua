--[[
  Leases. `lease:<id>` is either the record of a live lease or, from its end on, its tombstone, never both: a released
  lease does not come back (I5). `units:<endpoint>` has one member for each unit, by expiry: it is the only truth about
  what is in flight, and an expired unit stops counting at its instant, swept or not.
]]

local LEASE, UNITS, HOLD = root .. "lease:", root .. "units:", "hold:"
local rules
local counted_units = {}

-- The lease of that id, or false; and what became of it, or false.
local function lease_of(id)
  local packed = call("GET", LEASE .. id)
  if not packed then return false, false end
  local found = decode(packed)
  if found.endpoint then return found, false end
  return false, found.until_ms + tonumber(fact("away") or 0) - found.away_ms > now and found
end

local function in_flight(endpoint)
  local units = counted_units[endpoint]
  if not units then
    units = call("ZCOUNT", UNITS .. endpoint, now + 1, "+inf")
    counted_units[endpoint] = units
  end
  return units
end

-- Make sure that the sweep looks at this instant: `due` is never later than the first thing that time ends.
local function due_at(instant)
  local due = tonumber(fact("due") or nil)
  if not due or instant < due then set_fact("due", instant) end
end

-- Let a lease live until an instant.
local function set_expiry(id, lease, expires_at_ms)
  local units = UNITS .. lease.endpoint
  call("ZADD", units, expires_at_ms, id)
  for unit = 2, lease.cost do call("ZADD", units, expires_at_ms, id .. "\31" .. unit) end
  counted_units[lease.endpoint] = nil
  due_at(expires_at_ms)
end

-- Stop a lease from counting. Its record stays if the caller writes a tombstone over it.
local function end_lease(id, lease, keep_record)
  local units = UNITS .. lease.endpoint
  call("ZREM", units, id)
  for unit = 2, lease.cost do call("ZREM", units, id .. "\31" .. unit) end
  counted_units[lease.endpoint] = nil
  if lease.hold then set_fact(HOLD .. lease.process, false) end
  if not keep_record then call("DEL", LEASE .. id) end
end

--[[
  Record a lease that begins now in the present generation, with the probe's role if it has been given that.
  Returns when it ends.
]]
local function grant(id, lease, generation)
  local endpoint = lease.endpoint
  local units, expires_at_ms = counted_units[endpoint], now + (lease.hold and rules.hold_ms or rules.lease_ms)
  lease.generation = generation
  lease.started_at_ms = now
  call("SET", LEASE .. id, pack(lease))
  set_expiry(id, lease, expires_at_ms)
  counted_units[endpoint] = units and units + lease.cost
  if lease.hold then
    set_fact(HOLD .. lease.process, 1)
  elseif lease.rank >= BACKGROUND then
    set_fact("background_at:" .. endpoint, now)
    set_fact("background_at:" .. lease.home, now)
  end
  return expires_at_ms
end

--[[
  Leave a tombstone for one lease time, so that a repeated command gets the same answer (I11). Until when it holds is
  in the record, and moves on with what is added to the fact `away`; the key's own expiry only clears it away.
]]
local function bury(id, status, reason, retry_after_ms, takes)
  local stone = { status = status, until_ms = now + rules.lease_ms, away_ms = tonumber(fact("away") or 0) }
  if reason ~= "" then stone.reason = reason end
  if retry_after_ms > 0 then stone.retry_after_ms = retry_after_ms end
  if takes and #takes > 0 then stone.takes = takes end
  call("SET", LEASE .. id, pack(stone), "PX", 4 * rules.lease_ms + (injected and 600000 or 0))
end
