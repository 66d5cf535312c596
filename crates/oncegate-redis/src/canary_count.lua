-- Increments the write count of one process and returns it. A count below the expected minimum, ARGV[2], is not incremented: if
-- this reply were lost, an incremented count would hide the loss of writes from the next check. ARGV[1]: the expiry in
-- milliseconds.
local count = tonumber(redis.call('GET', KEYS[1]) or 0) or 0
if count >= tonumber(ARGV[2]) then
  count = count + 1
  redis.call('SET', KEYS[1], string.format('%.0f', count), 'PX', ARGV[1])
end
return string.format('%.0f', count)
