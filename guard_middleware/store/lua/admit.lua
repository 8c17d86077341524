--[[
  Lease a permit of an endpoint; else park the message, let the caller wait, or refuse, and say for how long.
  Guarantees: live leases never outnumber the limit (I1); a message leaves one place only together with its arrival in
  the next (I3); a refusal takes nothing from anybody; the same ids get the same answer (I11).
  KEYS[1] root             all keys of the guard begin with it
  KEYS[2] namespace        of the message's broker; only with a message
  ARGV[1] now_ms           "" for the server's time; only tests pass a number
  ARGV[2] process          id of the asking process
  ARGV[3] lease            id of the lease, unique per delivery
  ARGV[4] endpoint         asked for
  ARGV[5] rank             the priority's
  ARGV[6] cost             units
  ARGV[7] take             how many messages to hand over if this one parks
  ARGV[8] idle             idle threads of the process, -1 leaves what was reported
  ARGV[9] deadline_ms      when the message is too old, 0 for never
  ARGV[10] flags           letters: c confirm, s slot, w wait
  ARGV[11] queue           of the message; without one, the lease under which the call is made, "" for none
  ARGV[12] message         the broker's id of the delivery; this and the next only with a message
  ARGV[13] worker          the broker's id of the worker whose ack set holds it
  Reply: flat, see include/reply
     0 ADMITTED
     1 PARKED
     2 WAITING
     3 REFUSED
     4 GONE
     5 FINISHED            a repeat: the lease has ended
     6 STOLEN              a repeat: the lease has ended, and somebody else has the message
     7 IMPOSSIBLE
     8 UNCONFIGURED
]]
--- @include "state"
--- @include "facts"
--- @include "leases"
--- @include "rule"
--- @include "lines"
--- @include "moves"
--- @include "configuration"
--- @include "sweep"
--- @include "waiting"
--- @include "serve"
--- @include "reply"

-- The common case, without what the others need: one unit of an endpoint without a group; nobody waits, time has
-- ended nothing, and there is room.
local function admit_at_once()
  local process, lease_id, endpoint, rank = ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[5])
  local namespace, queue, message, worker = KEYS[2], KEYS[2] and ARGV[11], ARGV[12], ARGV[13]
  local fields = call("HMGET", STATE, "clock", "lines", "process:" .. process, "endpoint:" .. endpoint)
  local packed, known, one = fields[1], fields[3], fields[4]
  if packed and not fields[2] and known and one and ARGV[6] == "1" then
    local last_run, due, places, _, epoch_until, _, held_at, lease_ms, heartbeat_ms, _, _, _, fraction, _, _, rest =
      numbers(CLOCK, packed)
    local _, held = numbers(PROCESS, known)
    local mean, _, override, paused, generation, open_until, _, _, _, ramp, named, ceiling, _, reserve, breaker,
      _, _, _, _, budget = numbers(ENDPOINT, one)
    local limit = override >= 0 and override or ceiling
    if rank >= BACKGROUND and limit > 1 then
      limit = limit - min(reserve >= 0 and reserve or max(1, floor(fraction * limit + 0.5)), limit - 1)
    end
    if rest <= #packed and now >= epoch_until and now - last_run <= 2 * heartbeat_ms and now < due and held_at == huge
      and held == 0 and named == 1 and paused == 0 and budget < 0 and (breaker == 0 or (open_until == 0 and ramp == -1))
      and (not message or (call("HEXISTS", namespace .. ":" .. queue .. ".msgs", message) == 1
        and call("SISMEMBER", namespace .. ":__acks__." .. worker .. "." .. queue, message) == 1
        and call("HEXISTS", root .. "parked:" .. endpoint .. "\31" .. namespace .. "\31" .. queue, message) == 0))
      and call("ZCOUNT", UNITS .. endpoint, now + 1, "+inf") < limit
      and call("SET", LEASE .. lease_id, "L"
        .. pack_numbers(LEASE_NUMBERS, rank, 1, places + 1, tonumber(ARGV[9]) > now and ARGV[9] or 0, now,
          generation, 0)
        .. endpoint .. "\31" .. endpoint .. "\31" .. process .. "\31\31" .. (namespace or "")
        .. "\31" .. (queue or "")
        .. "\31" .. (message or "") .. "\31" .. (worker or "") .. "\31", "NX") then
      local expires_at_ms = now + lease_ms
      call("ZADD", UNITS .. endpoint, expires_at_ms, lease_id)
      local written = {}
      if message or expires_at_ms < due or (now - last_run) * STAMPS >= heartbeat_ms then
        local at_ms = (now - last_run) * STAMPS >= heartbeat_ms and now or last_run
        written[1] = "clock"
        written[2] = pack_numbers(">ddd", at_ms, min(due, expires_at_ms), message and places + 1 or places)
          .. packed:sub(25)
      end
      if ARGV[8] ~= "-1" then
        written[#written + 1] = "process:" .. process
        written[#written + 1] = pack_numbers(PROCESS, ARGV[8], 0)
      end
      if rank >= BACKGROUND then
        written[#written + 1] = "endpoint:" .. endpoint
        written[#written + 1] = pack_numbers(">dd", mean, now) .. one:sub(17)
      end
      if #written > 0 then call("HSET", STATE, unpack(written)) end
      return { 0, packed:sub(rest), -1, -1, expires_at_ms, generation, endpoint }
    end
  end
  return nil
end

local function admitted(process, lease_id, lease, expires_at_ms, serving)
  return answer(0, process, "", 0, serving, { lease = lease, lease_id = lease_id, expires_at_ms = expires_at_ms })
end

local function admit()
  local at_once = admit_at_once()
  if at_once then return at_once end

  local PARKED, WAITING, REFUSED, GONE, IMPOSSIBLE, UNCONFIGURED = 1, 2, 3, 4, 7, 8
  local LONGEST_SLOT_MS = 30000

  local process, lease_id, endpoint = ARGV[2], ARGV[3], ARGV[4]
  local rank, cost, want, idle = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8])
  local deadline_ms, flags, parent = tonumber(ARGV[9]), ARGV[10], not KEYS[2] and ARGV[11] ~= "" and ARGV[11] or nil
  local namespace, queue, message, worker = KEYS[2], KEYS[2] and ARGV[11], ARGV[12], ARGV[13]

  prefetch({
    "clock", "lines", "process:" .. process, "endpoint:" .. endpoint, "texts:" .. endpoint, "said:" .. process,
  })
  begin(process, idle)

  if epoch == "" or not endpoint_of(endpoint).named or not process_of(process) then
    return answer(UNCONFIGURED, process, "", 0)
  end

  -- The idle threads of the process once the one that asked is free again, too.
  local idle_parked = idle >= 0 and idle + want or process_of(process).idle

  -- Step 1: a repeated command, or a lease that came with a take and is to be confirmed.
  local lease, tombstone = lease_of(lease_id)
  if lease then
    local one = endpoint_of(lease.endpoint)
    local outdated = lease.generation ~= one.generation and one.open_until_ms ~= 0
    local expires_at_ms = expiry_of(lease_id, lease)
    if expires_at_ms > now and not (outdated and flags:find("c", 1, true)) then
      return admitted(process, lease_id, lease, expires_at_ms)
    end
    end_lease(lease_id, lease)
    freed = true
    if expires_at_ms <= now then put_back(lease) end    -- the sweep has not come so far
  elseif tombstone then
    return answer_again(tombstone, process, idle >= 0 and idle_parked or -1)
  end

  -- Step 2: whoever has the message now, this worker does not.
  local acks
  if message then
    acks = lines.ack_set(namespace, worker, queue)
    if call("HEXISTS", lines.messages(namespace, queue), message) == 0
      or call("SISMEMBER", acks, message) == 0 then
      return answer(GONE, process, "", 0)
    end
  end

  -- Its first place, if it has one; else a new one at the end.
  local line, waiter = endpoint .. "\31\31", lease_id
  if message then
    line, waiter = lines.name(endpoint, namespace, queue), message
  end
  local known = (message or fact("lines")) and lines.parked(line, waiter)
  local parked = known
  if deadline_ms <= now then deadline_ms = 0 end        -- its broker knows already
  if parked and message and parked.deadline_ms ~= deadline_ms then
    lines.forget_deadline(line, waiter)
    parked.deadline_ms = deadline_ms
    lines.remember(line, waiter, parked)
  elseif not parked then
    parked = {                          -- its place is counted if it takes it
      rank = rank, cost = cost, place = clock.places + 1, deadline_ms = deadline_ms,
      overloads = 0, denials = 0, overloaded = false, process = message and "" or process,
    }
  end

  -- Step 3: lease.
  local chosen, reason, retry_after_ms = decide(endpoint, parked, message and want > 0 and process or "", parent)
  local stays = message or (not chosen and flags:find("w", 1, true))
  if stays and not known and reason ~= "too_costly" then clock.places = parked.place end
  if chosen then
    if known and not message then
      lines.leave(line, waiter, parked)
      lines.forget(line, waiter)
    end
    local fresh = {
      endpoint = chosen, home = endpoint, rank = parked.rank, cost = parked.cost, process = process,
      place = parked.place, deadline_ms = parked.deadline_ms,
      namespace = namespace, queue = queue, message = message, worker = worker,
      parent = parent and lendable(chosen, parent) > 0 and parent or nil,
    }
    give_role(lease_id, chosen)
    return admitted(process, lease_id, fresh, grant(lease_id, fresh))
  end
  if reason == "too_costly" then
    if known then
      lines.leave(line, waiter, parked)
      lines.forget(line, waiter)
    end
    return answer(IMPOSSIBLE, process, reason, 0)
  end

  -- Step 4: park, and take for the thread that just became free; or wait; or refuse.
  if message then
    call("SREM", acks, message)
    lines.enter(line, waiter, parked)
    set_idle(process, idle_parked)
    local serving = serve(process, want, lease_id)
    bury(lease_id, PARKED, reason, retry_after_ms, serving.taken)
    return answer(PARKED, process, reason, retry_after_ms, serving)
  end
  if reason == "queue_ahead" then freed = true end   -- I9: somebody could go, and now has to hear of it
  if flags:find("w", 1, true) then
    if not lines.stands(line, waiter) then lines.enter(line, waiter, parked) end
    local serving = freed and serve(process, 0, "") or nil
    local given = freed and lease_of(lease_id)           -- what was free went to this very caller
    if given then return admitted(process, lease_id, given, expiry_of(lease_id, given), serving) end
    return answer(WAITING, process, reason, retry_after_ms, serving)
  end
  if flags:find("s", 1, true) then
    local slots = "slot:" .. endpoint .. "\31" .. ARGV[5]
    local slot = min(max(now, tonumber(fact(slots) or 0)) + step_ms(endpoint), now + LONGEST_SLOT_MS)
    set_fact(slots, slot)
    retry_after_ms = max(retry_after_ms, slot - now)
    bury(lease_id, REFUSED, reason, retry_after_ms)    -- I11: one slot per message
  end
  return answer(REFUSED, process, reason, retry_after_ms)
end
