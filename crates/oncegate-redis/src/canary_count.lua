-- Counts up what one process wrote. Answers with the count.
local count = string.format('%.0f', (tonumber(redis.call('GET', KEYS[1]) or 0) or 0) + 1)
redis.call('SET', KEYS[1], count, 'PX', ARGV[1])
return count
