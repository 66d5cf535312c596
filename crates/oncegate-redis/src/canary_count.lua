-- Counts up what one process wrote. A count behind the least that it must have stays as it is: were the answer lost, and
-- the count gone on, nobody would see any more that writes are gone. Answers with the count.
local count = tonumber(redis.call('GET', KEYS[1]) or 0) or 0
if count >= tonumber(ARGV[2]) then
  count = count + 1
  redis.call('SET', KEYS[1], string.format('%.0f', count), 'PX', ARGV[1])
end
return string.format('%.0f', count)
