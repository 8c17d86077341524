--[[
  Leases. `lease:<id>` is either the record of a live lease or, from its end on, its tombstone, never both: a released
  lease does not come back (I5). `units:<endpoint>` has one member for each unit, by expiry: it is the only truth about
  what is in flight, and an expired unit stops counting at its instant, swept or not.
]]

local HOLD = "hold:"
local rules
local freed = false
local counted_units = {}

local function lease_key(id) return root .. "lease:" .. id end

-- The lease of that id, or false; and what became of it, or false.
local function lease_of(id)
  local packed = call("GET", lease_key(id))
  if not packed then return false, false end
  local found = decode(packed)
  if found.endpoint then return found, false end
  return false, found.until_ms > now and found
end

local function in_flight(endpoint)
  local units = counted_units[endpoint]
  if not units then
    units = call("ZCOUNT", root .. "units:" .. endpoint, now + 1, "+inf")
    counted_units[endpoint] = units
  end
  return units
end

local function expiry_of(id, lease)
  return tonumber(call("ZSCORE", root .. "units:" .. lease.endpoint, id) or 0)
end

-- Let a lease live until an instant.
local function set_expiry(id, lease, expires_at_ms)
  local units = root .. "units:" .. lease.endpoint
  call("ZADD", units, expires_at_ms, id)
  for unit = 2, lease.cost do call("ZADD", units, expires_at_ms, id .. "\31" .. unit) end
  counted_units[lease.endpoint] = nil
  due_at(expires_at_ms)
end

-- Stop a lease from counting. Its record stays if the caller writes a tombstone over it.
local function end_lease(id, lease, keep_record)
  local units = root .. "units:" .. lease.endpoint
  call("ZREM", units, id)
  for unit = 2, lease.cost do call("ZREM", units, id .. "\31" .. unit) end
  counted_units[lease.endpoint] = nil
  if lease.hold then set_fact(HOLD .. lease.process, false) end
  if not keep_record then call("DEL", lease_key(id)) end
end

--[[
  Record a lease of an endpoint that is configured. In half-open it takes the probe's role; a role that had passed on
  ends its generation.
  Returns whether it is the probe, and when it ends.
]]
local function grant(id, lease)
  local endpoint = lease.endpoint
  local breaker = breaker_of(endpoint)
  local probe = breaker.open_until_ms ~= 0 and not lease.hold and phase_of(breaker) == "half_open"
    and record("spec:" .. endpoint).breaker
  if probe then
    local mean_ms = tonumber(fact("mean:" .. endpoint) or 0)
    breaker = {
      generation = breaker.generation + (breaker.probe ~= "" and 1 or 0),
      open_until_ms = breaker.open_until_ms, trips = breaker.trips, fails = breaker.fails, ramp = breaker.ramp,
      probe = id, probe_until_ms = now + max(rules.probe_deadline_ms, 4 * mean_ms),
    }
    set_breaker(endpoint, breaker)
  end
  lease.generation = breaker.generation
  lease.started_at_ms = now
  local expires_at_ms = now + (lease.hold and rules.hold_ms or rules.lease_ms)
  local units = counted_units[endpoint]
  call("SET", lease_key(id), pack(lease))
  set_expiry(id, lease, expires_at_ms)
  counted_units[endpoint] = units and units + lease.cost
  if lease.hold then
    set_fact(HOLD .. lease.process, 1)
  elseif lease.rank >= BACKGROUND then
    set_fact("background_at:" .. endpoint, now)
  end
  return probe, expires_at_ms
end

--[[
  Leave a tombstone for one lease time, so that a repeated command gets the same answer (I11). Until when it holds is
  in the record; the key's own expiry only clears it away.
]]
local function bury(id, status, reason, retry_after_ms, takes)
  local stone = { status = status, until_ms = now + rules.lease_ms }
  if reason ~= "" then stone.reason = reason end
  if retry_after_ms > 0 then stone.retry_after_ms = retry_after_ms end
  if takes and #takes > 0 then stone.takes = takes end
  call("SET", lease_key(id), pack(stone), "PX", rules.lease_ms + (injected and 600000 or 1000))
end
