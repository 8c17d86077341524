--[[
  The waiting lines (I3, I8): a waiter stands in `line:<line>` by rank and place, or in `held_back` until an instant;
  what is remembered of it is in `parked:<line>`. None of these keys has an expiry. A line is
  endpoint \31 namespace \31 queue; callers stand in endpoint \31 \31.
  Made at first use: most commands meet nobody who waits.
]]

-- Every lease, swept or not, with its id; bounded by what is in flight.
local function all_leases()
  local found = {}
  for _, endpoint in ipairs(call("SMEMBERS", root .. "leased")) do
    for _, id in ipairs(call("ZRANGE", UNITS .. endpoint, 0, -1)) do
      local lease = not id:find("\31", 1, true) and lease_of(id)
      if lease then
        lease.id = id
        found[#found + 1] = lease
      end
    end
  end
  return found
end

local made_lines
local function lines()
  if made_lines then return made_lines end
  local self = {}
  made_lines = self
  local HELD_BACK = root .. "held_back"
  local heads, split = {}, {}

  function self.name(endpoint, namespace, queue)
    return endpoint .. "\31" .. namespace .. "\31" .. queue
  end

  -- Endpoint, namespace and queue of a line, and the name of the queue ("" for callers).
  function self.parts(line)
    local known = split[line]
    if not known then
      local endpoint, namespace, queue = line:match("^(.-)\31(.-)\31(.*)$")
      local full = namespace .. "\31" .. queue
      known = { endpoint = endpoint, namespace = namespace, queue = queue, full = full ~= "\31" and full or "" }
      split[line] = known
    end
    return known
  end

  -- The lines in which somebody stands.
  function self.all()
    return record("lines") or {}
  end

  local function register(line)
    local all = self.all()
    for _, known in ipairs(all) do
      if known == line then return end
    end
    all[#all + 1] = line
    set_record("lines", all)
  end

  local function unregister(line)
    local left = {}
    for _, known in ipairs(self.all()) do
      if known ~= line then left[#left + 1] = known end
    end
    set_record("lines", #left > 0 and left)
  end

  function self.ack_set(namespace, worker, queue)
    return namespace .. ":__acks__." .. worker .. "." .. queue
  end

  function self.messages(namespace, queue)
    return namespace .. ":" .. queue .. ".msgs"
  end

  -- What is remembered of a waiter, or false.
  function self.parked(line, waiter)
    local packed = call("HGET", root .. "parked:" .. line, waiter)
    if not packed then return false end
    local rank, cost, place, overloads, denials, overloaded, deadline, rest = numbers(">ddddddd", packed)
    return {
      rank = rank, cost = cost, place = place, overloads = overloads, denials = denials, overloaded = overloaded == 1,
      deadline_ms = deadline, process = packed:sub(rest),
    }
  end

  function self.forget(line, waiter)
    call("HDEL", root .. "parked:" .. line, waiter)
  end

  -- The waiter at an index of a line, and its key in the order; nil behind the last.
  function self.at(line, index)
    local known = heads[line]
    if not known or known.index ~= index then
      local found = call("ZRANGE", root .. "line:" .. line, index, index, "WITHSCORES")
      known = { index = index, waiter = found[1], key = tonumber(found[2]) }
      heads[line] = known
    end
    return known.waiter, known.key
  end

  function self.background_waits(endpoint)
    for _, line in ipairs(self.all()) do
      if self.parts(line).endpoint == endpoint
        and call("ZCOUNT", root .. "line:" .. line, BACKGROUND * RANK, "+inf") > 0 then
        return true
      end
    end
    return false
  end

  function self.stands(line, waiter)
    if call("ZSCORE", root .. "line:" .. line, waiter) then return true end
    return clock.held_at_ms < huge and call("ZSCORE", HELD_BACK, line .. "\31" .. waiter) and true or false
  end

  local function held_changed()
    local first = call("ZRANGE", HELD_BACK, 0, 0, "WITHSCORES")
    clock.held_at_ms = tonumber(first[2] or huge)
  end

  -- Stand in a line whose record is written.
  function self.stand(line, waiter, parked)
    heads[line] = nil
    call("ZADD", root .. "line:" .. line, parked.rank * RANK + parked.place, waiter)
    register(line)
  end

  -- Stand in a line, or beside it until `not_before_ms`.
  function self.enter(line, waiter, parked, not_before_ms)
    local parts = self.parts(line)
    if parked.rank >= BACKGROUND and not self.background_waits(parts.endpoint) then
      local one = endpoint_of(parts.endpoint)
      one.background_at_ms = max(now, one.background_at_ms)
      changed_endpoints[parts.endpoint] = true
    end
    call("HSET", root .. "parked:" .. line, waiter, pack_numbers(">ddddddd", parked.rank, parked.cost, parked.place,
      parked.overloads, parked.denials, parked.overloaded and 1 or 0, parked.deadline_ms) .. parked.process)
    if not_before_ms and not_before_ms > now then
      call("ZADD", HELD_BACK, not_before_ms, line .. "\31" .. waiter)
      held_changed()
      clock.due_ms = min(clock.due_ms, not_before_ms)
    else
      self.stand(line, waiter, parked)
    end
    if parked.deadline_ms > 0 then
      call("ZADD", root .. "deadlines:" .. parts.full, parked.deadline_ms, line .. "\31" .. waiter)
      local firsts = record("deadlines") or {}
      if parked.deadline_ms < (firsts[parts.full] or huge) then
        firsts[parts.full] = parked.deadline_ms
        set_record("deadlines", firsts)
      end
    end
  end

  -- Leave a line, or the place beside it; the record stays. Returns whether the waiter stood there.
  function self.leave(line, waiter, parked)
    if clock.held_at_ms < huge and call("ZREM", HELD_BACK, line .. "\31" .. waiter) == 1 then
      held_changed()
    else
      if call("ZREM", root .. "line:" .. line, waiter) == 0 then return false end
      heads[line] = nil
      if call("EXISTS", root .. "line:" .. line) == 0 then unregister(line) end
    end
    if parked and parked.deadline_ms > 0 then
      call("ZREM", root .. "deadlines:" .. self.parts(line).full, line .. "\31" .. waiter)
    end
    return true
  end

  -- Return the message of an ended lease to its own place, if that worker still had it.
  function self.put_back(lease)
    local id = lease.message
    if not id or call("SREM", self.ack_set(lease.namespace, lease.worker, lease.queue), id) == 0 then return end
    local line = self.name(lease.home, lease.namespace, lease.queue)
    if call("HEXISTS", self.messages(lease.namespace, lease.queue), id) == 0 then
      self.forget(line, id)
      return
    end
    self.enter(line, id, self.parked(line, id) or self.record(lease))
  end

  -- What is remembered of a message from its first park on.
  function self.record(of)
    return {
      rank = of.rank, cost = of.cost, place = of.place, deadline_ms = of.deadline_ms,
      overloads = 0, denials = 0, overloaded = false, process = "",
    }
  end

  -- Make sure that a worker has the message. Returns false if somebody else has it.
  function self.withdraw(line, id, worker)
    local parts = self.parts(line)
    local acks = self.ack_set(parts.namespace, worker, parts.queue)
    if self.leave(line, id, self.parked(line, id)) then
      call("SADD", acks, id)
      return true
    end
    if call("SISMEMBER", acks, id) == 0 then return false end
    for _, lease in ipairs(all_leases()) do
      if lease.message == id and lease.worker == worker and lease.namespace == parts.namespace
        and lease.queue == parts.queue then
        return false                    -- this worker has it once more, by a take
      end
    end
    return true
  end

  --[[
    Put up to `most` parked messages of a queue back at its tail, in the order of their lines; of one line if `only`.
    Returns how many left.
  ]]
  function self.drain(full, most, only)
    local waiting = {}
    for _, line in ipairs(self.all()) do
      if self.parts(line).full == full and (not only or only == line) then
        local found = call("ZRANGE", root .. "line:" .. line, 0, most - 1, "WITHSCORES")
        for index = 1, #found, 2 do
          waiting[#waiting + 1] = { line = line, waiter = found[index], key = tonumber(found[index + 1]) }
        end
      end
    end
    local beside = clock.held_at_ms < huge and call("ZRANGE", HELD_BACK, 0, -1) or {}
    for _, member in ipairs(beside) do
      local line, waiter = member:match("^(.-\31.-\31.-)\31(.*)$")
      if self.parts(line).full == full and (not only or only == line) then
        local parked = self.parked(line, waiter)
        waiting[#waiting + 1] = { line = line, waiter = waiter, key = parked.rank * RANK + parked.place }
      end
    end
    table.sort(waiting, in_order)
    local moved = min(most, #waiting)
    for index = 1, moved do
      local line, waiter = waiting[index].line, waiting[index].waiter
      local parts = self.parts(line)
      self.leave(line, waiter, self.parked(line, waiter))
      self.forget(line, waiter)
      if call("HEXISTS", self.messages(parts.namespace, parts.queue), waiter) == 1 then
        call("RPUSH", parts.namespace .. ":" .. parts.queue, waiter)
      end
    end
    return moved
  end

  return self
end
