--[[
  What every command does first: move all expiries on if the store was away, end what time has ended, and note that
  this process speaks.
]]

local SWEEP_LEASES, SWEEP_PROCESSES = 256, 16

local function consumers_key(full) return root .. "consumers:" .. full end

--[[
  Drop what a process published and reported. Its leases end by themselves. Returns whether the configuration in force
  has to be found anew.
]]
local function forget_process(process)
  freed = true
  local said = record("said:" .. process)
  for full in pairs(said and said.queues or {}) do call("SREM", consumers_key(full), process) end
  set_record("said:" .. process, false)
  call("ZREM", root .. "alive", process)
  local known = process_of(process)
  if known and known.held then end_hold(process) end
  processes[process], changed_processes[process] = false, nil
  set_fact("process:" .. process, false)
  return call("HDEL", root .. "published", process) == 1
end

-- The store was away: nobody's lease ended because of that, nor did what is remembered of those that had.
local function move_on(gap)
  clock.away_ms = clock.away_ms + gap
  for _, endpoint in ipairs(record("leased") or {}) do
    local units = UNITS .. endpoint
    for _, unit in ipairs(call("ZRANGE", units, 0, -1)) do call("ZINCRBY", units, gap, unit) end
  end
  for _, name in ipairs({ root .. "alive", NESTED }) do
    for _, member in ipairs(call("ZRANGE", name, 0, -1)) do call("ZINCRBY", name, gap, member) end
  end
end

local function sweep()
  local expired = {}
  for _, endpoint in ipairs(record("leased") or {}) do
    local units = UNITS .. endpoint
    local found = call("ZRANGEBYSCORE", units, "-inf", now, "WITHSCORES", "LIMIT", 0, SWEEP_LEASES)
    for index = 1, #found, 2 do
      if not found[index]:find("\31", 1, true) then
        expired[#expired + 1] = { id = found[index], at_ms = tonumber(found[index + 1]), endpoint = endpoint }
      end
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
    if lease then
      end_lease(id, lease)
      if lease.hold then set_idle(lease.process, 0) end
      put_back(lease)
    elseif id:sub(1, #HOLD) == HOLD then -- as below
      end_hold(id:sub(#HOLD + 1))
      set_idle(id:sub(#HOLD + 1), 0)
    else                                -- the server evicted its record: it must not stop everybody for good
      drop_units(expired[index].endpoint, id)
    end
  end

  local is_other = false
  for _, process in ipairs(call("ZRANGEBYSCORE", root .. "alive", "-inf", now, "LIMIT", 0, SWEEP_PROCESSES)) do
    is_other = forget_process(process) or is_other
  end
  if is_other then recompute() end

  if clock.held_at_ms <= now then
    local held_back = root .. "held_back"
    local over = call("ZRANGEBYSCORE", held_back, "-inf", now, "LIMIT", 0, SWEEP_LEASES)
    for _, member in ipairs(over) do
      local line, waiter = member:match("^(.-\31.-\31.-)\31(.*)$")
      freed = true
      lines.stand(line, waiter, lines.waiter(line, waiter))
      call("ZREM", held_back, member)
    end
    clock.held_at_ms = tonumber(call("ZRANGE", held_back, 0, 0, "WITHSCORES")[2] or huge)
  end

  local alive = call("ZRANGE", root .. "alive", 0, 0, "WITHSCORES")[2]
  clock.due_ms = min(clock.held_at_ms, tonumber(alive or huge))
  for _, endpoint in ipairs(record("leased") or {}) do
    local first = call("ZRANGE", UNITS .. endpoint, 0, 0, "WITHSCORES")[2]
    clock.due_ms = min(clock.due_ms, tonumber(first or huge))
  end
end

-- Begin a command of a process ("" for an operator); `idle` is -1 to leave what was reported.
local function begin(process, idle)
  local gap = now - clock.last_run_ms
  if gap > 2 * rules.heartbeat_ms then move_on(gap) end
  if gap * STAMPS >= rules.heartbeat_ms then clock.last_run_ms = now end
  if now >= clock.due_ms then sweep() end
  local known = process_of(process)
  if known and known.held then
    end_hold(process)
    freed = true
  end
  if idle >= 0 then set_idle(process, idle) end
end
