DELETE FROM pauses WHERE queue = $1
