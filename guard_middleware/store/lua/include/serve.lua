--[[
  Who goes next (I8, I9): gives free permits to the best waiters that somebody idle can run.
]]

local SCAN, WAKES = 500, 8

local function wake(serving, runner, lease_id)
  if not serving.notified[runner] then serving.woken[#serving.woken + 1] = runner end
  if not serving.notified[runner] or lease_id ~= "" then call("PUBLISH", root .. "wake:" .. runner, lease_id) end
  serving.notified[runner] = true
end

local function new_lease(endpoint, line, runner, parked)
  return {
    endpoint = endpoint, home = lines.parts(line).endpoint, rank = parked.rank, cost = parked.cost,
    process = runner, place = parked.place, deadline_ms = parked.deadline_ms,
  }
end

-- The message goes to an idle thread of the asking process: to run at an endpoint, or, at "", for its broker to end it.
local function take(serving, line, waiter, parked, endpoint)
  local parts = lines.parts(line)
  local payload = call("HGET", lines.messages(parts.namespace, parts.queue), waiter)
  lines.leave(line, waiter, parked)
  if not payload then                 -- flushed: a ghost never counts as a take
    lines.forget(line, waiter)
    return
  end
  clock.takes = clock.takes + 1
  local id = epoch .. ":" .. clock.takes
  local lease, worker = new_lease(endpoint, line, serving.process, parked), room.process(serving.process).worker
  lease.via = serving.via
  lease.namespace, lease.queue, lease.message, lease.worker = parts.namespace, parts.queue, waiter, worker
  if endpoint == "" then may_lease(endpoint) end
  local probe = give_role(id, endpoint)
  local expires_at_ms = grant(id, lease)
  call("SADD", lines.ack_set(parts.namespace, worker, parts.queue), waiter)
  set_idle(serving.process, max(0, process_of(serving.process).idle - 1))
  serving.want = serving.want - 1
  serving.taken[#serving.taken + 1] = id
  for _, value in ipairs({
    id, endpoint, parts.endpoint, lease.generation, probe and 1 or 0, expires_at_ms, parked.rank, parked.cost,
    parts.namespace, parts.queue, waiter, payload,
  }) do serving.takes[#serving.takes + 1] = value end
end

-- Hand waiters that are too old to their broker's age limit, without a permit.
local function hand_over_old(serving)
  local firsts = serving.want > 0 and room.process(serving.process) and record("deadlines")
  if not firsts then return end
  local old, looked = {}, {}
  for full in pairs(room.process(serving.process).queues) do
    if firsts[full] and firsts[full] <= now then
      looked[#looked + 1] = full
      local found = call("ZRANGEBYSCORE", root .. "deadlines:" .. full, "-inf", now, "WITHSCORES", "LIMIT", 0,
        serving.want)
      for index = 1, #found, 2 do old[#old + 1] = { member = found[index], at_ms = tonumber(found[index + 1]) } end
    end
  end
  table.sort(old, function(one, other)
    if one.at_ms ~= other.at_ms then return one.at_ms < other.at_ms end
    return before(one.member, other.member)
  end)
  for index = 1, min(serving.want, #old) do
    local line, waiter = old[index].member:match("^(.-\31.-\31.-)\31(.*)$")
    take(serving, line, waiter, lines.waiter(line, waiter), "")
  end
  for _, full in ipairs(looked) do
    local first = call("ZRANGE", root .. "deadlines:" .. full, 0, 0, "WITHSCORES")[2]
    firsts[full] = first and tonumber(first)
  end
  set_record("deadlines", next(firsts) and firsts or false)
end

-- Nobody idle can run this line now; a caller whose process is gone leaves it.
local function nobody(serving, line, waiter, parked)
  local parts = lines.parts(line)
  if parts.full == "" then
    lines.leave(line, waiter, parked)
    lines.forget(line, waiter)
    return
  end
  serving.skipped[line] = true
  local known = room.process(serving.process)
  if known and known.queues[parts.full] then
    local _, reason = place_call(parts.endpoint, parked.rank, parked.cost, false)
    if not reason then serving.waiting = 1 end
  end
end

-- The best takeable waiter of `home` that `endpoint` would admit and that has not seen a server shed load, or nil.
local function other_probe(serving, home, endpoint)
  local best
  for _, line in ipairs(lines.all()) do
    local found = lines.parts(line).endpoint == home
      and call("ZRANGE", root .. "line:" .. line, 0, PROBE_SCAN - 1, "WITHSCORES") or {}
    for index = 1, #found, 2 do
      local parked, key = lines.waiter(line, found[index]), tonumber(found[index + 1])
      local runner = parked.overloaded and "" or room.runner(line, parked, serving.want > 0 and serving.process or "")
      local chosen, reason
      if runner ~= "" then chosen, reason = place_call(home, parked.rank, parked.cost, false) end
      if chosen == endpoint and not reason then
        local other = { key = key, line = line, waiter = found[index], parked = parked, runner = runner }
        if not best or in_order(other, best) then best = other end
        break
      end
    end
  end
  return best
end

local function let_go(serving, line, waiter, parked, endpoint, runner)
  local parts = lines.parts(line)
  if parts.full == "" then
    lines.leave(line, waiter, parked)
    lines.forget(line, waiter)
    give_role(waiter, endpoint)
    grant(waiter, new_lease(endpoint, line, runner, parked))
    wake(serving, runner, waiter)
  elseif runner == serving.process and serving.want > 0 then
    take(serving, line, waiter, parked, endpoint)
  elseif #serving.woken >= WAKES then
    serving.closed[parts.endpoint] = true
  else                                -- only another process can: keep a unit for it, and tell it
    local hold = new_lease(endpoint, line, runner, parked)
    hold.hold = true
    grant(HOLD .. runner, hold)
    wake(serving, runner, "")
    serving.passed[line .. "\31" .. waiter] = true
  end
end

-- Let one waiter go, or close what stands against it for the rest of this command.
local function attempt(serving, line, waiter, aged)
  local parked, home = lines.waiter(line, waiter), lines.parts(line).endpoint
  local runner = room.runner(line, parked, serving.want > 0 and serving.process or "")
  if runner == "" then return nobody(serving, line, waiter, parked) end
  local endpoint, reason, by_group = place_call(home, parked.rank, parked.cost, aged)
  local there = endpoint_of(endpoint)
  if reason and not release_helps(home, endpoint, parked.rank, parked.cost, aged) then
    serving.passed[line .. "\31" .. waiter] = true
    local own = endpoint_of(home)
    if runner == serving.process and serving.want > 0 and lines.parts(line).full ~= "" and own.named
      and never_fits(own, parked.cost) then
      take(serving, line, waiter, parked, "")
    end
    return
  end
  if by_group then serving.claimed[texts_of(endpoint).group] = true end
  if reason or (there.budget >= 0 and serving.claimed[texts_of(endpoint).group]
    and in_flight(endpoint) + parked.cost > there.floor) then
    serving.closed[home] = true
    return
  end
  if parked.overloaded and phase_of(there) == "half_open" then
    local other = other_probe(serving, home, endpoint)
    if other then line, waiter, parked, runner = other.line, other.waiter, other.parked, other.runner end
  end
  let_go(serving, line, waiter, parked, endpoint, runner)
end

-- The best waiter of a line that is still open in this command, or nil.
local function first_of(serving, line)
  if serving.skipped[line] or serving.closed[lines.parts(line).endpoint] then return nil end
  local index = serving.first[line] or 0  -- those before it were passed
  local waiter, key = lines.at(line, index)
  while waiter and serving.passed[line .. "\31" .. waiter] do
    index = index + 1
    waiter, key = lines.at(line, index)
  end
  serving.first[line] = index
  return waiter and { key = key, line = line, waiter = waiter }
end

-- Put a line back among the others, by its best waiter.
local function line_up(serving, line)
  local one, order = first_of(serving, line), serving.order
  if not one then return end
  local index = 1
  while order[index] and in_order(order[index], one) do index = index + 1 end
  table.insert(order, index, one)
end

-- The best waiter among the lines that are still open in this command, or nil. Its line has to be put back.
local function best_waiter(serving)
  local order = serving.order
  while #order > 0 do
    local best = table.remove(order, 1)
    local now_first = first_of(serving, best.line)
    if now_first and now_first.waiter == best.waiter then return best end
    if now_first then line_up(serving, best.line) end
  end
  return nil
end

--[[
  `want` messages for `process`, which has as many idle threads; the new leases remember `via`, the command's id.
  Returns what was handed out: among it `takes`, flat, a message in twelve values; `taken`, the lease ids; `woken`;
  `waiting`.
]]
local function serve(process, want, via)
  local serving = { process = process, want = want, via = via, takes = {}, taken = {}, woken = {}, waiting = 0 }
  if nobody_waits() or now < clock.epoch_until_ms then return serving end
  serving.closed, serving.claimed, serving.skipped, serving.passed, serving.notified = {}, {}, {}, {}, {}
  serving.first = {}
  hand_over_old(serving)
  local homes, seen = {}, {}
  for _, line in ipairs(lines.all()) do
    local endpoint = lines.parts(line).endpoint
    if not seen[endpoint] then homes[#homes + 1] = endpoint end
    seen[endpoint] = true
  end
  table.sort(homes, before)
  for _, endpoint in ipairs(homes) do
    local line, waiter = room.aged(endpoint)
    if line then attempt(serving, line, waiter, true) end
  end
  serving.order = {}
  for _, line in ipairs(lines.all()) do
    serving.order[#serving.order + 1] = first_of(serving, line)
  end
  table.sort(serving.order, in_order)
  for _ = 1, SCAN do
    local best = best_waiter(serving)
    if not best then break end
    attempt(serving, best.line, best.waiter, false)
    line_up(serving, best.line)
  end
  return serving
end
