--[[
  Carry out an operation: move a breaker, override a ceiling, pause, drain, withdraw a caller, forget a process.
  Guarantees: an operation is carried out as a whole or not at all; what it frees is given away in the same call (I9);
  a drained message is in its queue again (I3).
  KEYS[1] root             all keys of the guard begin with it
  ARGV[1] now_ms           "" for the server's time; only tests pass a number
  ARGV[2] action           open, close, reset, override, clear_override, pause, resume, drain, withdraw, forget
  ARGV[3] target           an endpoint; a lease (withdraw); a process (forget)
  ARGV[4] value            milliseconds (open), a ceiling (override), the most messages of one call (drain; 0 for 500)
  ARGV[5] namespace        of the queue to drain
  ARGV[6] queue            to drain
  ARGV[7] force            1 to drain although a guarded worker would park the messages again
  Reply: flat, see include/reply
     9 DONE
    10 REFUSED_ALIVE
]]
--- @include "state"
--- @include "facts"
--- @include "leases"
--- @include "rule"
--- @include "breaker"
--- @include "lines"
--- @include "moves"
--- @include "configuration"
--- @include "sweep"
--- @include "waiting"
--- @include "serve"
--- @include "reply"
--- @include "held"

local function operate()
  local DONE, REFUSED_ALIVE = 9, 10
  local DRAIN_BATCH = 500

  local action, target, value = ARGV[2], ARGV[3], tonumber(ARGV[4])
  local full = ARGV[5] .. "\31" .. ARGV[6]

  prefetch({ "clock", "lines", "endpoint:" .. target })
  begin("", -1)

  local moved = 0
  local one = endpoint_of(target)
  if action == "open" then
    move_breaker(target, now + value, one.trips, -1)
  elseif action == "close" or action == "reset" then
    move_breaker(target, 0, 0, -1)
  elseif action == "override" or action == "clear_override" then
    one.override = action == "override" and value or -1
    changed_endpoints[target] = true
  elseif action == "pause" or action == "resume" then
    one.paused = action == "pause"
    changed_endpoints[target] = true
  elseif action == "drain" then
    if call("EXISTS", consumers_key(full)) == 1 and ARGV[7] ~= "1" then return answer(REFUSED_ALIVE, "", "", 0) end
    moved = drain(full, value > 0 and value or DRAIN_BATCH)
  elseif action == "withdraw" then
    local standing = {}
    for _, line in ipairs(lines.all()) do standing[#standing + 1] = line end
    for _, line in ipairs(standing) do
      local parked = lines.parts(line).full == "" and lines.parked(line, target)
      if parked then
        lines.leave(line, target, parked)
        lines.forget(line, target)
      end
    end
    give_back(target)
    local lease, tombstone = lease_of(target)
    if not lease and not tombstone then bury(target, GONE, "", 0) end -- its ask may still be on the way
  elseif action == "forget" then
    for _, id in ipairs(leases_of(target)) do give_back(id) end
    if forget_process(target) then recompute() end
  else
    return redis.error_reply("ERR guard: unknown action")
  end
  return answer(DONE, "", "", 0, serve("", 0, ""), { count = moved })
end
