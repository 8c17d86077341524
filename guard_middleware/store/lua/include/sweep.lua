--[[
  What every command does first: move all expiries on if the store was away, end what time has ended, and note that
  this process speaks.
]]

local SWEEP_LEASES, SWEEP_PROCESSES = 256, 16
local freed = false                     -- something that a waiter may have now

local function consumers_key(full) return root .. "consumers:" .. full end

-- Drop what a process published and reported. Its leases end by themselves.
local function forget_process(process)
  freed = true
  local packed = call("HGET", root .. "processes", process)
  if packed then
    for full in pairs(decode(packed).queues) do call("SREM", consumers_key(full), process) end
    call("HDEL", root .. "processes", process)
  end
  call("ZREM", root .. "alive", process)
  set_fact("idle:" .. process, false)
  if fact(HOLD .. process) then
    local hold = lease_of(HOLD .. process)
    if hold then end_lease(HOLD .. process, hold) end
  end
  if call("HDEL", root .. "published", process) == 1 then recompute() end
end

-- The store was away: nobody's lease ended because of that, nor did what is remembered of those that had.
local function move_on(gap)
  set_fact("away", tonumber(fact("away") or 0) + gap)
  for _, endpoint in ipairs(call("SMEMBERS", root .. "leased")) do
    local units = UNITS .. endpoint
    for _, unit in ipairs(call("ZRANGE", units, 0, -1)) do call("ZINCRBY", units, gap, unit) end
  end
  for _, process in ipairs(call("ZRANGE", root .. "alive", 0, -1)) do
    call("ZINCRBY", root .. "alive", gap, process)
  end
end

local function sweep()
  local expired = {}
  for _, endpoint in ipairs(call("SMEMBERS", root .. "leased")) do
    local units = UNITS .. endpoint
    local found = call("ZRANGEBYSCORE", units, "-inf", now, "WITHSCORES", "LIMIT", 0, SWEEP_LEASES)
    for index = 1, #found, 2 do
      if not found[index]:find("\31", 1, true) then
        expired[#expired + 1] = { id = found[index], at_ms = tonumber(found[index + 1]) }
      end
    end
    if #found == 0 and not fact("spec:" .. endpoint) and call("EXISTS", units) == 0 then
      call("SREM", root .. "leased", endpoint)
    end
  end
  table.sort(expired, function(one, other)
    if one.at_ms ~= other.at_ms then return one.at_ms < other.at_ms end
    return before(one.id, other.id)
  end)
  for index = 1, min(#expired, SWEEP_LEASES) do
    local id = expired[index].id
    local lease = lease_of(id)
    freed = true
    end_lease(id, lease)
    if lease.hold and fact("idle:" .. lease.process) then set_fact("idle:" .. lease.process, 0) end
    lines().put_back(lease)
  end

  for _, process in ipairs(call("ZRANGEBYSCORE", root .. "alive", "-inf", now, "LIMIT", 0, SWEEP_PROCESSES)) do
    forget_process(process)
  end

  if tonumber(fact("held_at") or now + 1) <= now then
    local held_back = root .. "held_back"
    local over = call("ZRANGEBYSCORE", held_back, "-inf", now, "LIMIT", 0, SWEEP_LEASES)
    for _, member in ipairs(over) do
      local line, waiter = member:match("^(.-\31.-\31.-)\31(.*)$")
      freed = true
      lines().stand(line, waiter, lines().parked(line, waiter))
      call("ZREM", held_back, member)
    end
    set_fact("held_at", call("ZRANGE", held_back, 0, 0, "WITHSCORES")[2] or false)
  end

  set_fact("due", false)
  for _, endpoint in ipairs(call("SMEMBERS", root .. "leased")) do
    local first = call("ZRANGE", UNITS .. endpoint, 0, 0, "WITHSCORES")[2]
    if first then due_at(tonumber(first)) end
  end
  local first = call("ZRANGE", root .. "alive", 0, 0, "WITHSCORES")[2]
  if first then due_at(tonumber(first)) end
  if fact("held_at") then due_at(tonumber(fact("held_at"))) end
end

-- Begin a command of a process ("" for an operator); `idle` is -1 to leave what was reported.
local function begin(process, idle)
  rules = record("rules") or DEFAULT_RULES
  local gap = now - tonumber(fact("last_run") or now)
  if gap > 2 * rules.heartbeat_ms then move_on(gap) end
  set_fact("last_run", now)
  if now >= tonumber(fact("due") or now + 1) then sweep() end
  if fact(HOLD .. process) then
    end_lease(HOLD .. process, (lease_of(HOLD .. process)))
    freed = true
  end
  local known = fact("idle:" .. process)
  if idle >= 0 and known and tonumber(known) ~= idle then set_fact("idle:" .. process, idle) end
end
