--[[
  Leases. `lease:<id>` is either the record of a live lease or, from its end on, its tombstone, never both: a released
  lease does not come back (I5). `units:<endpoint>` has one member for each unit, by expiry: it is the only truth about
  what is in flight, and an expired unit stops counting at its instant, swept or not.
]]

local LEASE, UNITS, HOLD = root .. "lease:", root .. "units:", "hold:"
local counted_units = {}

-- The lease of that id, or false; and what became of it, or false.
local function lease_of(id)
  local packed = call("GET", LEASE .. id)
  if not packed then return false, false end
  if packed:byte(1) == 84 then          -- T, a tombstone
    local status, until_ms, away_ms, retry_after_ms, rest = numbers(">dddd", packed, 2)
    if until_ms + clock.away_ms - away_ms <= now then return false, false end
    local texts = rest <= #packed and decode(packed:sub(rest)) or {}
    return false, { status = status, retry_after_ms = retry_after_ms, reason = texts[1] or "", takes = texts[2] or {} }
  end
  local rank, cost, place, deadline, started, generation, hold, rest = numbers(">ddddddd", packed, 2)
  local texts = decode(packed:sub(rest))
  return {
    rank = rank, cost = cost, place = place, deadline_ms = deadline, started_at_ms = started, generation = generation,
    hold = hold == 1, endpoint = texts[1], home = texts[2], process = texts[3], via = texts[4],
    namespace = texts[5], queue = texts[6], message = texts[7], worker = texts[8],
  }, false
end

-- Write the record of a live lease. Returns whether it is there now: not if `only` is "NX" and the id is taken.
local function write_lease(id, lease, only)
  local packed = "L" .. pack_numbers(">ddddddd", lease.rank, lease.cost, lease.place, lease.deadline_ms,
    lease.started_at_ms, lease.generation, lease.hold and 1 or 0)
    .. pack({
      lease.endpoint, lease.home, lease.process, lease.via or "", lease.namespace, lease.queue, lease.message,
      lease.worker,
    })
  if only then return call("SET", LEASE .. id, packed, only) end
  return call("SET", LEASE .. id, packed)
end

--[[
  Leave a tombstone for one lease time, so that a repeated command gets the same answer (I11). Until when it holds is
  in the record, and moves on with the time that the store was away; the key's own expiry only clears it away.
]]
local function bury(id, status, reason, retry_after_ms, takes)
  local packed = "T" .. pack_numbers(">dddd", status, now + rules.lease_ms, clock.away_ms, retry_after_ms)
  if reason ~= "" or takes then packed = packed .. pack({ reason, takes }) end
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
  counted_units[lease.endpoint] = nil
  if expires_at_ms < clock.due_ms then clock.due_ms = expires_at_ms end
end

-- Stop a lease from counting. Its record stays if the caller writes a tombstone over it.
local function end_lease(id, lease, keep_record)
  local units = UNITS .. lease.endpoint
  call("ZREM", units, id)
  for unit = 2, lease.cost do call("ZREM", units, id .. "\31" .. unit) end
  counted_units[lease.endpoint] = nil
  local known = lease.hold and process_of(lease.process)
  if known then
    known.held = false
    changed_processes[lease.process] = true
  end
  if not keep_record then call("DEL", LEASE .. id) end
end
