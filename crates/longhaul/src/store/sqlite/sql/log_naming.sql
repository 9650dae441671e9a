-- Records of a task that have this text in them somewhere.
SELECT records FROM log WHERE task = ?1 AND instr(records, ?2) > 0;
