--[[
  Publish what a process knows about the endpoints, in the place of what it published before.
  Guarantees: of what the live processes publish, the smallest at the highest revision applies, to all, at once; a store
  without an epoch gets one, and holds admissions for a while.
  KEYS[1] root             all keys of the guard begin with it
  ARGV[1] now_ms           "" for the server's time; only tests pass a number
  ARGV[2] process          id of the process
  ARGV[3] first_start_hold_ms  how long a store without an epoch holds admissions, -1 for one heartbeat
  ARGV[4] epoch            that this process remembers, "" for none: if it is another one, data was lost, and admissions
                           are held until the present one is a lease time old
  ARGV[5] revision         of the configuration
  ARGV[6...] values        the eight rules; the number of endpoints, and eleven values for each; the number of budgets,
                           and group and budget for each
  Reply: flat, see include/reply
     9 DONE
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
--- @include "arguments"

local function configure()
  local DONE = 9

  local process, hold_ms = ARGV[2], tonumber(ARGV[3])
  position = 5
  prefetch({ "clock", "lines", "process:" .. process, "endpoints", "leased" })
  begin(process, -1)

  local published = {
    revision = tonumber(ARGV[5]),
    rules = {
      lease_ms = number(), heartbeat_ms = number(), hold_ms = number(), ageing_ms = number(), max_overloads = number(),
      reserve_fraction = number(), probe_deadline_ms = number(), retry_after_cap_ms = number(),
    },
    specs = {},
    budgets = {},
  }
  for _ = 1, number() do
    local spec = {
      id = text(), ceiling = number(), floor = number(), reserve = number(), group = text(), fallback = text(),
      breaker = text() == "1", fail_threshold = number(), base_cooldown_ms = number(), max_cooldown_ms = number(),
      backoff_factor = number(),
    }
    published.specs[#published.specs + 1] = spec
  end
  for _ = 1, number() do
    published.budgets[#published.budgets + 1] = { id = text(), budget = number() }
  end
  call("HSET", root .. "published", process, pack(published))
  recompute()

  if not process_of(process) then
    processes[process] = { idle = 0, held = false }
    changed_processes[process], changed["process:" .. process] = true, nil
  end
  call("ZADD", root .. "alive", now + rules.lease_ms, process)
  clock.due_ms = min(clock.due_ms, now + rules.lease_ms)
  local made_ms = tonumber(epoch:match("@(%d+)$") or 0)
  if ARGV[4] ~= "" and ARGV[4] ~= epoch and now < made_ms + rules.lease_ms then -- data was lost
    clock.epoch_until_ms = max(clock.epoch_until_ms, made_ms + rules.lease_ms)
  end
  if epoch == "" then
    epoch = process .. "@" .. string.format("%.0f", now)
    if hold_ms < 0 then hold_ms = rules.heartbeat_ms end
    clock.epoch_until_ms = now + (ARGV[4] ~= "" and rules.lease_ms or hold_ms)
  end
  freed = true                            -- a ceiling may have risen
  return answer(DONE, process, "", 0)
end
