"""The SQL functions that the sandbox offers. What is not named here is refused, whatever a later DuckDB adds.

Left out on purpose: functions that read files, settings, variables or the catalogue; that run SQL given as text; that
keep state (sequences, seeds, logs); that sleep; and those that build a huge value from a small number (range, repeat,
lpad), because DuckDB does not look at its interrupt inside one call: `list_sum(range(1e9))` ran 75 s past its limit.

For the same reason, and because text inside one call does not count towards DuckDB's memory limit, those are left out
that grow a text again and again (replace, regexp_replace, bin, hex, base64, regexp_escape, list_reduce; three `replace`
over 40 rows took 22 s and 8 GB under limits of 3 s and 0.5 GB), those that compare two texts in the product of their
lengths (levenshtein, editdist3, jaro), that reserve what an argument says (reservoir_quantile), and list_aggregate,
which takes the name of any aggregate as text, so of those that are not named here too.
"""

from __future__ import annotations

_OPERATORS = "+ - * / // % ^ ** & | << >> ~ ~~ !~~ ~~* !~~* ~~~ || @ @> <@ && ^@ -> ->> <-> <=>"
_AGGREGATES = """any_value approx_count_distinct approx_quantile approx_top_k arbitrary arg_max arg_max_null arg_min
    arg_min_null argmax argmin array_agg avg bit_and bit_or bit_xor bool_and bool_or corr count count_if count_star
    countif covar_pop covar_samp entropy favg first fsum geomean geometric_mean group_concat histogram histogram_exact
    kahan_sum kurtosis kurtosis_pop last list listagg lttb mad max max_by mean median min min_by mode product quantile
    quantile_cont quantile_disc regr_avgx regr_avgy regr_count regr_intercept regr_r2 regr_slope regr_sxx regr_sxy
    regr_syy sem skewness stddev stddev_pop stddev_samp string_agg sum sumkahan var_pop var_samp variance wavg
    weighted_avg"""
_WINDOW = """cume_dist dense_rank fill first_value lag last_value lead nth_value ntile percent_rank rank rank_dense
    row_number"""
_NUMBERS = """abs acos acosh add asin asinh atan atan2 atanh bit_count cbrt ceil ceiling cos cosh cot degrees divide
    even exp fdiv floor fmod gamma gcd greatest greatest_common_divisor hash isfinite isinf isnan lcm least
    least_common_multiple lgamma ln log log10 log2 mod multiply nextafter pi pow power radians round round_even
    roundbankers sign signbit sin sinh sqrt subtract tan tanh trunc xor equi_width_bins"""
_TEXT = """ascii chr char_length character_length concat concat_ws contains decode encode ends_with format_bytes
    from_base64 from_hex hamming ilike_escape instr jaccard lcase left length len like_escape lower ltrim md5
    mismatches nfc_normalize not_ilike_escape not_like_escape octet_length ord overlay position prefix regexp_extract
    regexp_extract_all regexp_full_match regexp_matches regexp_split_to_array reverse right rtrim sha1 sha256 split
    split_part starts_with str_split str_split_regex string_split string_split_regex string_to_array strip_accents
    strlen strpos substr substring suffix to_base translate trim ucase unhex unicode upper url_decode url_encode unbin
    from_binary"""
_TIME = """age ago century current_date current_localtime current_localtimestamp date_add date_diff
    date_part date_sub date_trunc datediff datepart datesub datetrunc day dayname dayofmonth dayofweek dayofyear
    days_in_month decade epoch epoch_ms epoch_ns epoch_us era get_current_time get_current_timestamp hour isodow
    isoyear julian last_day make_date make_time make_timestamp make_timestamp_ms make_timestamp_ns make_timestamptz
    microsecond millennium millisecond minute month monthname nanosecond normalized_interval now quarter second
    strftime strptime time_bucket timezone timezone_hour timezone_minute to_centuries to_days to_decades to_hours
    to_microseconds to_millennia to_milliseconds to_minutes to_months to_quarters to_seconds to_timestamp to_weeks
    to_years today transaction_timestamp try_strptime week weekday weekofyear year yearweek"""
_NESTED = """apply array_append array_apply array_cat array_concat array_contains array_distance array_distinct
    array_extract array_filter array_has array_has_all array_has_any array_indexof array_intersect array_length
    array_position array_prepend array_reverse array_reverse_sort array_select array_slice array_sort array_to_string
    array_transform array_unique array_value array_where array_zip cardinality element_at filter flatten json
    json_array json_array_length json_contains json_exists json_extract json_extract_path json_extract_path_text
    json_extract_string json_keys json_object json_structure json_type json_valid json_value list_any_value list_append
    list_apply list_avg list_cat list_concat list_contains list_count list_distance list_distinct list_element
    list_extract list_filter list_first list_grade_up list_has list_has_all list_has_any list_histogram list_indexof
    list_intersect list_last list_max list_median list_min list_mode list_pack list_position list_prepend list_product
    list_reverse list_reverse_sort list_select list_slice list_sort list_stddev_pop list_stddev_samp list_sum
    list_transform list_unique list_value list_var_pop list_var_samp list_where list_zip map map_concat map_contains
    map_entries map_extract map_extract_value map_from_entries map_keys map_values row row_to_json struct_extract
    struct_extract_at struct_insert struct_keys struct_pack struct_values to_json unnest unpivot_list"""
_OTHER = "constant_or_null error if nullif typeof uuid gen_random_uuid alias"

SCALARS = frozenset(
    word
    for table in (_OPERATORS, _AGGREGATES, _WINDOW, _NUMBERS, _TEXT, _TIME, _NESTED, _OTHER)
    for word in table.split()
)
TABLE_FUNCTIONS = frozenset({"range", "generate_series", "unnest"})
