--[[
  Who waits, who could run it, and who is ahead of whom (DESIGN section 6, rule 3). Made at first use.
]]

local AGED_KEY = -RANK                  -- before every rank

local made_room
local function room()
  if made_room then return made_room end
  local self = {}
  made_room = self
  local queues_of, consumers_of = {}, {}

  -- The queues that a process consumes (as keys of a table) and its worker, or false for an unknown process.
  function self.process(process)
    local known = queues_of[process]
    if known == nil then
      local packed = process ~= "" and call("HGET", root .. "processes", process)
      known = packed and decode(packed)
      queues_of[process] = known
    end
    return known
  end

  -- The processes that consume a queue; what is known of their idle threads and holds is fetched in bulk.
  local function consumers(full)
    local known = consumers_of[full]
    if not known then
      known = call("SMEMBERS", consumers_key(full))
      for first = 1, #known, CHUNK / 2 do
        local fields = {}
        for index = first, min(#known, first + CHUNK / 2 - 1) do
          local process = known[index]
          if facts["idle:" .. process] == nil then fields[#fields + 1] = "idle:" .. process end
          if facts[HOLD .. process] == nil then fields[#fields + 1] = HOLD .. process end
        end
        if #fields > 0 then prefetch(fields) end
      end
      consumers_of[full] = known
    end
    return known
  end

  --[[
    Who could run a waiter, "" for nobody: `first`, which asks with an idle thread of its own; else the process with
    the most idle threads and no unserved hold. A waiting caller runs in its own process as long as that is alive.
  ]]
  function self.runner(line, parked, first)
    local full = lines().parts(line).full
    if full == "" then return fact("idle:" .. parked.process) and parked.process or "" end
    local asker = first ~= "" and self.process(first)
    if asker and asker.queues[full] then return first end
    local best, most = "", 0
    for _, process in ipairs(consumers(full)) do
      local idle = tonumber(fact("idle:" .. process) or 0)
      if idle > 0 and idle >= most and not fact(HOLD .. process) and (idle > most or before(process, best)) then
        best, most = process, idle
      end
    end
    return best
  end

  -- The line and the background waiter whose turn it is because none has started for the ageing time; nil if none.
  function self.aged(endpoint)
    if now - tonumber(fact("background_at:" .. endpoint) or now) < rules.ageing_ms then return nil end
    local best_line, best, best_key
    for _, line in ipairs(lines().all()) do
      if lines().parts(line).endpoint == endpoint then
        local found = call("ZRANGEBYSCORE", root .. "line:" .. line, BACKGROUND * RANK, "+inf", "WITHSCORES",
          "LIMIT", 0, 1)
        local key = tonumber(found[2])
        if key and (not best_key or key < best_key or (key == best_key and before(line, best_line))) then
          best_line, best, best_key = line, found[1], key
        end
      end
    end
    return best_line, best
  end

  -- Whether the waiters of `home` count as standing at `endpoint` too, because its breaker is not closed.
  local function falls_back(home, endpoint)
    local spec = spec_of(home)
    return spec and spec.fallback == endpoint and phase_at(home, spec) ~= "closed"
  end

  --[[
    Rule 3: whether a takeable waiter goes before this call, which would start at `endpoint`. `asker` is the process
    that could run a waiter of its own queues instead, "" if it could not.
  ]]
  function self.queue_ahead(home, endpoint, parked, asker)
    local target = spec_of(endpoint)
    if not target then return false end
    local key = parked.rank * RANK + parked.place
    local in_floor = in_flight(endpoint) + parked.cost <= target.floor
    for _, line in ipairs(lines().all()) do
      local other = lines().parts(line).endpoint
      local same = other == home or other == endpoint or falls_back(other, endpoint)
      local spec = not same and target.budget and not in_floor and spec_of(other)
      if same or (spec and spec.group == target.group) then
        local aged_line, aged_waiter = self.aged(other)
        local is_aged = aged_line == line
        local waiter, head_key = lines().at(line, 0)
        if is_aged then waiter = aged_waiter end
        local head = lines().parked(line, waiter)
        if is_aged then head_key = AGED_KEY + head.place end
        if head_key < key and self.runner(line, head, asker) ~= "" then
          local _, reason, by_group = place_call(other, head.rank, head.cost, same and is_aged)
          if by_group or (same and (not reason or (reason == "endpoint_full" and head.cost > 1))) then return true end
        end
      end
    end
    return false
  end

  return self
end

-- Whether nobody stands in any line, or beside it.
local function nobody_waits()
  return not fact("lines") and not fact("held_at")
end

--[[
  The whole rule for a call that has arrived now.
  Returns the endpoint that admits it, or nil with the reason and how long it lasts ("too_costly": for ever).
]]
local function decide(home, parked, asker)
  local spec = spec_of(home)
  if parked.cost > spec.ceiling or (spec.budget and parked.cost > spec.budget - spec.floors) then
    return nil, "too_costly", 0
  end
  local epoch_until_ms = tonumber(fact("epoch_until") or 0)
  if now < epoch_until_ms then return nil, "recovering", epoch_until_ms - now end
  local endpoint, reason, by_group = place_call(home, parked.rank, parked.cost, false)
  if (not reason or by_group) and fact("lines") and room().queue_ahead(home, endpoint, parked, asker) then
    reason = "queue_ahead"
  end
  if not reason then return endpoint end
  if reason == "breaker_open" or reason == "probing" or reason == "paused" then
    return nil, reason, wait_ms(endpoint, reason)
  end
  return nil, reason, step_ms(endpoint)
end
