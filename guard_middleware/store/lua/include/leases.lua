--[[
  Leases. `lease:<id>` is either the record of a live lease or, from its end on, its tombstone, never both: a released
  lease does not come back (I5). `units:<endpoint>` has one member for each unit, by expiry: it is the only truth about
  what is in flight, and an expired unit stops counting at its instant, swept or not. A lease at the endpoint "" uses no
  capacity: it says where a message is that was handed over without a permit.
]]

local TEXTS = "^" .. ("([^\31]*)\31"):rep(8) .. "(.*)$"

-- The lease of that id, or false; and what became of it, or false.
local function lease_of(id)
  local packed = call("GET", LEASE .. id)
  if not packed then return false, false end
  if packed:byte(1) == 84 then          -- T, a tombstone
    local status, until_ms, away_ms, retry_after_ms, rest = numbers(TOMBSTONE, packed, 2)
    if until_ms + clock.away_ms - away_ms <= now then return false, false end
    local takes = {}
    local texts = packed:sub(rest)
    for take in texts:gmatch("\31([^\31]*)") do takes[#takes + 1] = take end
    return false, {
      status = status, retry_after_ms = retry_after_ms, reason = texts:match("^[^\31]*"), takes = takes,
    }
  end
  local rank, cost, place, deadline, started, generation, hold, rest = numbers(LEASE_NUMBERS, packed, 2)
  local endpoint, home, process, via, namespace, queue, message, worker, parent = packed:match(TEXTS, rest)
  local lease = {
    rank = rank, cost = cost, place = place, deadline_ms = deadline, started_at_ms = started, generation = generation,
    hold = hold == 1, endpoint = endpoint, home = home, process = process, via = via, parent = parent,
  }
  if message ~= "" then
    lease.namespace, lease.queue, lease.message, lease.worker = namespace, queue, message, worker
  end
  return lease, false
end

local function write_lease(id, lease)
  call("SET", LEASE .. id, "L" .. pack_numbers(LEASE_NUMBERS, lease.rank, lease.cost, lease.place, lease.deadline_ms,
    lease.started_at_ms, lease.generation, lease.hold and 1 or 0) .. lease.endpoint .. "\31" .. lease.home .. "\31"
    .. lease.process .. "\31" .. (lease.via or "") .. "\31" .. (lease.namespace or "") .. "\31" .. (lease.queue or "")
    .. "\31" .. (lease.message or "") .. "\31" .. (lease.worker or "") .. "\31" .. (lease.parent or ""))
end

--[[
  Leave a tombstone for one lease time, so that a repeated command gets the same answer (I11). Until when it holds is
  in the record, and moves on with the time that the store was away; the key's own expiry only clears it away.
]]
local function bury(id, status, reason, retry_after_ms, takes)
  local packed = "T" .. pack_numbers(TOMBSTONE, status, now + rules.lease_ms, clock.away_ms, retry_after_ms) .. reason
  for _, take in ipairs(takes or {}) do packed = packed .. "\31" .. take end
  call("SET", LEASE .. id, packed, "PX", 4 * rules.lease_ms + (injected and 600000 or 0))
end

local function in_flight(endpoint)
  local units = counted_units[endpoint]
  if not units then
    units = call("ZCOUNT", UNITS .. endpoint, now + 1, "+inf")
    counted_units[endpoint] = units
  end
  return units
end

-- Let a lease live until an instant. `due` is never later than the first thing that time ends.
local function set_expiry(id, lease, expires_at_ms)
  local units = UNITS .. lease.endpoint
  call("ZADD", units, expires_at_ms, id)
  for unit = 2, lease.cost do call("ZADD", units, expires_at_ms, id .. "\31" .. unit) end
  if lease.parent and lease.parent ~= "" then call("ZADD", NESTED, expires_at_ms, id) end
  counted_units[lease.endpoint] = nil
  if expires_at_ms < clock.due_ms then clock.due_ms = expires_at_ms end
end

-- Make sure that the sweep looks at the leases of an endpoint.
local function may_lease(endpoint)
  local leased = record("leased") or {}
  for _, known in ipairs(leased) do
    if known == endpoint then return end
  end
  leased[#leased + 1] = endpoint
  set_record("leased", leased)
end

--[[
  Record a lease that begins now, in the present generation of its endpoint, which is configured. Returns when it ends.
]]
local function grant(id, lease)
  local one, counted = endpoint_of(lease.endpoint), counted_units[lease.endpoint]
  local expires_at_ms = now + (lease.hold and rules.hold_ms or rules.lease_ms)
  lease.generation = one.generation
  lease.started_at_ms = now
  write_lease(id, lease)
  set_expiry(id, lease, expires_at_ms)
  counted_units[lease.endpoint] = counted and counted + lease.cost
  if lease.hold then
    process_of(lease.process).held = true
    changed_processes[lease.process] = true
  elseif lease.rank >= BACKGROUND and lease.endpoint ~= "" then
    one.background_at_ms = now
    endpoint_of(lease.home).background_at_ms = now
    changed_endpoints[lease.endpoint], changed_endpoints[lease.home] = true, true
  end
  return expires_at_ms
end

-- Stop a lease from counting. Its record stays if the caller writes a tombstone over it.
local function end_lease(id, lease, keep_record)
  local units = UNITS .. lease.endpoint
  call("ZREM", units, id)
  for unit = 2, lease.cost do call("ZREM", units, id .. "\31" .. unit) end
  if lease.parent and lease.parent ~= "" then call("ZREM", NESTED, id) end
  counted_units[lease.endpoint] = nil
  local known = lease.hold and process_of(lease.process)
  if known then
    known.held = false
    changed_processes[lease.process] = true
  end
  if not keep_record then call("DEL", LEASE .. id) end
end

-- When a lease ends.
local function expiry_of(id, lease)
  return tonumber(call("ZSCORE", UNITS .. lease.endpoint, id) or 0)
end

-- Stop from counting what the server has evicted the record of.
local function drop_units(endpoint, id)
  call("ZREM", UNITS .. endpoint, id)
  local unit = 2
  while call("ZREM", UNITS .. endpoint, id .. "\31" .. unit) == 1 do unit = unit + 1 end
  counted_units[endpoint] = nil
end

-- End what is kept for a process.
local function end_hold(process)
  local id, known = HOLD .. process, process_of(process)
  local lease = lease_of(id)
  if lease then return end_lease(id, lease) end
  for _, endpoint in ipairs(record("leased") or {}) do drop_units(endpoint, id) end
  if known then
    known.held = false
    changed_processes[process] = true
  end
end

-- The live leases that use the units of another live one, as { child, parent }; bounded by what is in flight.
local function nested()
  local pairs_of = {}
  for _, id in ipairs(call("ZRANGEBYSCORE", NESTED, now + 1, "+inf")) do
    local child = lease_of(id)
    local parent = child and lease_of(child.parent)
    if parent and expiry_of(child.parent, parent) > now then
      pairs_of[#pairs_of + 1] = { child = child, parent = parent }
    end
  end
  return pairs_of
end
