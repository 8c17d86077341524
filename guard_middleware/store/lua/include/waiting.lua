--[[
  Who waits, who could run it, and who is ahead of whom (DESIGN section 6, rule 3).
]]

local AGED_KEY = -RANK                  -- before every rank
local PROBE_SCAN = 32                   -- how far into a line the first that fits is looked for

-- Whether releases could let a waiter of `home` go, there and at the endpoint chosen instead.
local function release_helps(home, endpoint, rank, cost, aged)
  return fits_alone(endpoint_of(home), rank, cost, aged) and fits_alone(endpoint_of(endpoint), rank, cost, aged)
end

local room = {}

-- What a process said in its last beat: its worker, and the queues that it consumes as keys of a table; or false.
function room.process(process)
  return process ~= "" and record("said:" .. process)
end

-- The processes that consume a queue; what is known of their idle threads and holds is fetched in bulk.
local function consumers(full)
  local known = consumers_of[full]
  if not known then
    known = call("SMEMBERS", consumers_key(full))
    for first = 1, #known, CHUNK do
      local fields = {}
      for index = first, min(#known, first + CHUNK - 1) do
        local field = "process:" .. known[index]
        if facts[field] == nil then fields[#fields + 1] = field end
      end
      if #fields > 0 then
        local values = call("HMGET", STATE, unpack(fields))
        for index = 1, #fields do facts[fields[index]] = values[index] end
      end
    end
    consumers_of[full] = known
  end
  return known
end

--[[
  Who could run a waiter, "" for nobody: `first`, which asks with an idle thread of its own; else the process with
  the most idle threads and no unserved hold. A waiting caller runs in its own process as long as that is alive.
]]
function room.runner(line, parked, first)
  local full = lines.parts(line).full
  if full == "" then return process_of(parked.process) and parked.process or "" end
  local asker = first ~= "" and room.process(first)
  if asker and asker.queues[full] then return first end
  local best, most = "", 0
  for _, process in ipairs(consumers(full)) do
    local known = process_of(process)
    if known and known.idle > 0 and known.idle >= most and not known.held
      and (known.idle > most or before(process, best)) then
      best, most = process, known.idle
    end
  end
  return best
end

-- The background waiter at an index of a line, to be compared with those of other lines; nil behind the last.
local function background_at(line, index)
  local found = call("ZRANGEBYSCORE", root .. "line:" .. line, BACKGROUND * RANK, "+inf", "WITHSCORES",
    "LIMIT", index, 1)
  return found[1] and { line = line, waiter = found[1], key = tonumber(found[2]), index = index }
end

--[[
  The background waiter whose turn it is because none has started for the ageing time: its line, its id and its
  record; nil if there is none.
]]
function room.aged(endpoint)
  local one = endpoint_of(endpoint)
  if one.background_at_ms == 0 or now - one.background_at_ms < rules.ageing_ms then return nil end
  if aged_of[endpoint] then return unpack(aged_of[endpoint]) end
  aged_of[endpoint] = {}
  local firsts = {}                     -- of each line the first that was not looked at
  for _, line in ipairs(lines.all()) do
    firsts[#firsts + 1] = lines.parts(line).endpoint == endpoint and background_at(line, 0) or nil
  end
  for _ = 1, PROBE_SCAN do
    local best
    for index, first in ipairs(firsts) do
      if not best or in_order(first, firsts[best]) then best = index end
    end
    if not best then break end
    local first = firsts[best]
    local parked = lines.waiter(first.line, first.waiter)
    if fits_alone(one, parked.rank, parked.cost, true) then
      aged_of[endpoint] = { first.line, first.waiter, parked }
      return first.line, first.waiter, parked
    end
    local following = background_at(first.line, first.index + 1)
    if following then firsts[best] = following else table.remove(firsts, best) end
  end
  return nil
end

--[[
  The first of a line that somebody waits for and that a release could let go; if the turn of an aged background
  waiter has come, it is that one. Returns its record, its key in the order, and whether it is the aged one.
]]
local function head(line)
  local parts = lines.parts(line)
  local aged_line, _, aged = room.aged(parts.endpoint)
  if aged_line == line then return aged, AGED_KEY + aged.place, true end
  local first, first_key
  for index = 0, PROBE_SCAN - 1 do
    local waiter, key = lines.at(line, index)
    if not waiter then break end
    local parked = lines.waiter(line, waiter)
    local gone = parts.full == "" and not process_of(parked.process)
    local endpoint, reason = place_call(parts.endpoint, parked.rank, parked.cost, false)
    if not gone and (not reason or release_helps(parts.endpoint, endpoint, parked.rank, parked.cost, false)) then
      return parked, key, false
    end
    if index == 0 then first, first_key = parked, key end
  end
  return first, first_key, false
end

-- Whether the waiters of `home` count as standing at `endpoint` too, because its breaker is not closed.
local function falls_back(home, endpoint)
  local one = endpoint_of(home)
  return one.named and phase_of(one) ~= "closed" and texts_of(home).fallback == endpoint
end

--[[
  Rule 3: whether a takeable waiter goes before this call, which would start at `endpoint`. `asker` is the process
  that could run a waiter of its own queues instead, "" if it could not; `parent` is the lease under which the call is
  made, nil for none.
]]
function room.queue_ahead(home, endpoint, parked, asker, parent)
  local target = endpoint_of(endpoint)
  if not target.named then return false end
  local key = parked.rank * RANK + parked.place
  local lent = parent and target.budget >= 0 and parked.cost <= lendable(endpoint, parent)
  local takes_from_others = target.budget >= 0 and in_flight(endpoint) + parked.cost > target.floor and not lent
  for _, line in ipairs(lines.all()) do
    local other = lines.parts(line).endpoint
    local same = other == home or other == endpoint or falls_back(other, endpoint)
    if same or (takes_from_others and endpoint_of(other).named
      and texts_of(other).group == texts_of(endpoint).group) then
      local first, first_key, aged = head(line)
      if first_key < key and room.runner(line, first, asker) ~= "" then
        local chosen, reason, by_group = place_call(other, first.rank, first.cost, aged)
        if same and not reason then return true end
        local needed = by_group and not lent or not by_group and same and first.cost > 1
          and (reason == "endpoint_full" or reason == "reserved")
        if needed and release_helps(other, chosen, first.rank, first.cost, aged) then return true end
      end
    end
  end
  return false
end

-- Whether nobody stands in any line, or beside it.
local function nobody_waits()
  return clock.held_at_ms == huge and not fact("lines")
end

--[[
  The whole rule for a call that has arrived now.
  Returns the endpoint that admits it, or nil with the reason and how long it lasts ("too_costly": for ever).
]]
local function decide(home, parked, asker, parent)
  if never_fits(endpoint_of(home), parked.cost) then return nil, "too_costly", 0 end
  if now < clock.epoch_until_ms then return nil, "recovering", clock.epoch_until_ms - now end
  local endpoint, reason, by_group = place_call(home, parked.rank, parked.cost, false, parent)
  if (not reason or by_group) and fact("lines") and room.queue_ahead(home, endpoint, parked, asker, parent) then
    reason = "queue_ahead"
  end
  if not reason then return endpoint end
  local one = endpoint_of(endpoint)
  if reason == "breaker_open" then return nil, reason, one.open_until_ms - now end
  if reason == "probing" then return nil, reason, max(1, min(mean_of(one), one.probe_until_ms - now)) end
  if reason == "paused" then return nil, reason, rules.heartbeat_ms end
  return nil, reason, step_ms(endpoint)
end
