-- The leases of one process, and how they go back.

local GONE = 4

-- Ids of the leases that a process has, oldest name first; units held for it are not among them.
local function leases_of(process)
  local mine = {}
  for _, lease in ipairs(all_leases()) do
    if lease.process == process and not lease.hold then mine[#mine + 1] = lease.id end
  end
  table.sort(mine, function(one, other)
    if #one ~= #other then return #one < #other end
    return before(one, other)
  end)
  return mine
end

-- End a lease whose call has not begun: its message returns to its place, and its outcome says nothing.
local function give_back(id)
  local lease = lease_of(id)
  if not lease then return end
  end_lease(id, lease, true)
  put_back(lease)
  bury(id, GONE, "", 0)
end
