--[[
  The reply, flat: status, epoch, next_ms, waiting, expires_at_ms, generation, endpoint, probe, reason, retry_after_ms,
  count, and four lists, each with its length before it: lost, stolen, woken, takes. What is left out at the end is
  zero or empty.
]]

local TAKE = 12                         -- values of one message that is handed over

-- In how many milliseconds time alone may free something for a waiter; -1 if nobody waits.
local function next_ms()
  if nobody_waits() then return -1 end
  local soonest = huge
  local function later(instant)
    if instant > now then soonest = min(soonest, instant - now) end
  end
  later(clock.held_at_ms)
  if fact("lines") then
    for _, endpoint in ipairs(record("leased") or {}) do
      if counted_units[endpoint] ~= 0 then
        local first = call("ZRANGEBYSCORE", UNITS .. endpoint, now + 1, "+inf", "WITHSCORES", "LIMIT", 0, 1)[2]
        later(tonumber(first or 0))
      end
    end
    later(clock.epoch_until_ms)
    local seen = {}
    for _, line in ipairs(lines.all()) do
      local endpoint = lines.parts(line).endpoint
      if not seen[endpoint] then
        seen[endpoint] = true
        local fallback = texts_of(endpoint).fallback
        for _, one in ipairs({ endpoint, fallback ~= "" and fallback or nil }) do
          later(endpoint_of(one).open_until_ms)
          later(endpoint_of(one).probe_until_ms)
        end
        if lines.background_waits(endpoint) then
          local since_ms = endpoint_of(endpoint).background_at_ms
          later((since_ms > 0 and since_ms or now) + rules.ageing_ms)
        end
      end
    end
  end
  return soonest < huge and soonest or rules.heartbeat_ms
end

-- Messages of leases that were handed over before, as far as they are still there, in the form of `serve`.
local function takes_again(lease_ids)
  local takes = {}
  for _, id in ipairs(lease_ids) do
    local lease = lease_of(id)
    local payload = lease and lease.message and expiry_of(id, lease) > now
      and call("HGET", lines.messages(lease.namespace, lease.queue), lease.message)
    if payload then
      for _, value in ipairs({
        id, lease.endpoint, lease.home, lease.generation, endpoint_of(lease.endpoint).probe == id and 1 or 0,
        expiry_of(id, lease), lease.rank, lease.cost, lease.namespace, lease.queue, lease.message, payload,
      }) do takes[#takes + 1] = value end
    end
  end
  return takes
end

--[[
  Answer a process. I9: what the sweep, or the command, has freed is given away in the same command.
  `more` has what is not usual: lease, lease_id, expires_at_ms; count; lost, stolen.
]]
local function answer(status, process, reason, retry_after_ms, serving, more)
  if not serving and freed then serving = serve(process, 0, "") end
  more = more or {}
  local lease = more.lease or { generation = 0, endpoint = "" }
  local probe = more.lease and endpoint_of(lease.endpoint).probe == more.lease_id
  local reply = {
    status, epoch, next_ms(), serving and serving.waiting or -1, more.expires_at_ms or 0, lease.generation,
    lease.endpoint, probe and 1 or 0, reason, retry_after_ms, more.count or 0,
  }
  local woken, takes = serving and serving.woken or {}, serving and serving.takes or {}
  local lost, stolen = more.lost or {}, more.stolen or {}
  if #woken + #takes + #lost + #stolen > 0 then
    for _, list in ipairs({ lost, stolen, woken, takes }) do
      reply[#reply + 1] = #list
      for _, value in ipairs(list) do reply[#reply + 1] = value end
    end
  end
  flush()
  return reply
end

-- The same answer again, with the same messages as far as they are still leased (I11); `idle` is -1 if not said.
local function answer_again(stone, process, idle)
  local takes = takes_again(stone.takes)
  if idle >= 0 then set_idle(process, max(0, idle - #takes / TAKE)) end
  local serving = serve(process, 0, "") -- its hold ended when it spoke
  serving.takes = takes
  return answer(stone.status, process, stone.reason, stone.retry_after_ms, serving)
end
