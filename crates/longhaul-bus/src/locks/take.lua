-- Takes the lock KEYS[1] for the owner ARGV[1] for ARGV[2] milliseconds, if it is free and the owner's turn.
-- KEYS[2]: who waits, by when they came; KEYS[3]: who waits, by when they asked last; KEYS[4]: the largest token.
-- ARGV[3]: the owner's token, or nothing; ARGV[4]: after how many milliseconds of silence one waits no longer.
local held = redis.call('GET', KEYS[1])
if held == ARGV[1] then
    redis.call('PEXPIRE', KEYS[1], ARGV[2])
    return {'taken'}
end

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
for _, silent in ipairs(redis.call('ZRANGEBYSCORE', KEYS[3], '-inf', now - ARGV[4])) do
    redis.call('ZREM', KEYS[2], silent)
    redis.call('ZREM', KEYS[3], silent)
end
redis.call('ZADD', KEYS[2], 'NX', time[1] * 1000000 + time[2], ARGV[1])
redis.call('ZADD', KEYS[3], now, ARGV[1])
redis.call('PEXPIRE', KEYS[2], ARGV[4] * 2)
redis.call('PEXPIRE', KEYS[3], ARGV[4] * 2)
if held or redis.call('ZRANGE', KEYS[2], 0, 0)[1] ~= ARGV[1] then
    return {'busy'}
end

if ARGV[3] ~= '' then
    local largest = redis.call('GET', KEYS[4])
    if largest and tonumber(largest) >= tonumber(ARGV[3]) then
        return {'outdated', largest}
    end
    redis.call('SET', KEYS[4], ARGV[3])
end
redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2])
redis.call('ZREM', KEYS[2], ARGV[1])
redis.call('ZREM', KEYS[3], ARGV[1])
return {'taken'}
