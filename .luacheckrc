-- The scripts run inside the server, which has no more globals than these and lets a script set none.
std = {
  read_globals = {
    "KEYS", "ARGV", "redis", "cjson", "cmsgpack", "struct", "bit",
    "assert", "error", "ipairs", "next", "pairs", "pcall", "select", "tonumber", "tostring", "type", "unpack",
    "xpcall", "math", "string", "table",
  },
}
max_line_length = 120
max_comment_line_length = false -- the first line of a written script lists what luacheck may pass over
