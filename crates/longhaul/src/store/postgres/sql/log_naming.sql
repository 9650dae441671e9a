-- Records of tasks that have the text of the same place in them somewhere.
SELECT log.task, log.records
  FROM unnest($1::uuid[], $2::text[]) AS asked (task, text)
  JOIN log ON log.task = asked.task
 WHERE strpos(log.records, asked.text) > 0
