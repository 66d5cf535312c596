-- Counts up the canary, or gives it a new birth where there is none. Answers with its birth and its count.
local birth, count = string.match(redis.call('GET', KEYS[1]) or '', '^v1 k (%S+) (%d+)$')
if not birth then birth, count = ARGV[1], 0 end
count = string.format('%.0f', tonumber(count) + 1)
redis.call('SET', KEYS[1], 'v1 k ' .. birth .. ' ' .. count, 'PX', ARGV[2])
return { birth, count }
