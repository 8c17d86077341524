-- How messages move between workers, lines and queues (I3).

-- Every lease, swept or not, with its id; bounded by what is in flight.
local function all_leases()
  local found = {}
  for _, endpoint in ipairs(record("leased") or {}) do
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

-- What is remembered of a message from its first park on.
local function record_of(of)
  return {
    rank = of.rank, cost = of.cost, place = of.place, deadline_ms = of.deadline_ms,
    overloads = 0, denials = 0, overloaded = false, process = "",
  }
end

-- Return the message of an ended lease to its own place, if that worker still had it.
local function put_back(lease)
  local id = lease.message
  if not id or call("SREM", lines.ack_set(lease.namespace, lease.worker, lease.queue), id) == 0 then return end
  local line = lines.name(lease.home, lease.namespace, lease.queue)
  if call("HEXISTS", lines.messages(lease.namespace, lease.queue), id) == 0 then
    lines.forget(line, id)
    return
  end
  lines.enter(line, id, lines.parked(line, id) or record_of(lease))
end

-- Make sure that a worker has the message. Returns false if somebody else has it.
local function withdraw(line, id, worker)
  local parts = lines.parts(line)
  local acks = lines.ack_set(parts.namespace, worker, parts.queue)
  if lines.leave(line, id, lines.parked(line, id)) then
    call("SADD", acks, id)
    return true
  end
  if call("SISMEMBER", acks, id) == 0 then return false end
  for _, lease in ipairs(all_leases()) do
    if lease.message == id and lease.worker == worker and lease.namespace == parts.namespace
      and lease.queue == parts.queue then
      return false                      -- this worker has it once more, by a take
    end
  end
  return true
end

--[[
  Put up to `most` parked messages of a queue back at its tail, in the order of their lines; of one line if `only`.
  Returns how many left.
]]
local function drain(full, most, only)
  local waiting = {}
  for _, line in ipairs(lines.all()) do
    if lines.parts(line).full == full and (not only or only == line) then
      local found = call("ZRANGE", root .. "line:" .. line, 0, most - 1, "WITHSCORES")
      for index = 1, #found, 2 do
        waiting[#waiting + 1] = { line = line, waiter = found[index], key = tonumber(found[index + 1]) }
      end
    end
  end
  local beside = clock.held_at_ms < huge and call("ZRANGE", root .. "held_back", 0, -1) or {}
  for _, member in ipairs(beside) do
    local line, waiter = member:match("^(.-\31.-\31.-)\31(.*)$")
    if lines.parts(line).full == full and (not only or only == line) then
      local parked = lines.waiter(line, waiter)
      waiting[#waiting + 1] = { line = line, waiter = waiter, key = parked.rank * RANK + parked.place }
    end
  end
  table.sort(waiting, in_order)
  local moved = min(most, #waiting)
  for index = 1, moved do
    local line, waiter = waiting[index].line, waiting[index].waiter
    local parts = lines.parts(line)
    lines.leave(line, waiter, lines.parked(line, waiter))
    lines.forget(line, waiter)
    if call("HEXISTS", lines.messages(parts.namespace, parts.queue), waiter) == 1 then
      call("RPUSH", parts.namespace .. ":" .. parts.queue, waiter)
    end
  end
  return moved
end
