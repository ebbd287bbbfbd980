-- Delays by carrier, computed anew from the table with each run.
CREATE MATERIALIZED VIEW delays AS
SELECT carrier, count(*) AS flights, count(dep_delay) AS departed, round(avg(dep_delay), 2) AS delay_minutes
FROM departures
GROUP BY carrier;
