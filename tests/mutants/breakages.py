"""Hand-made breakages of the stateful parts: a patch, and the test that has to go red when it is applied.

Read it as a list of the guards: take one out, and this is who notices. Patches are in `patches/`, by name.
"""

ATTEMPTS = "tests/loops/test_schedules.py"
AVERAGED = "tests/loops/test_averaged.py"
APPLY = "tests/scaler/test_apply.py"
CAUSES = "tests/faults/test_causes.py"
CLIPPING = "tests/scaler/test_clipping.py"
CLUSTERS = "tests/scaler/test_clusters.py"
DYNAMIC = "tests/scaler/strategies/test_dynamic.py"
INVARIANTS = "tests/scaler/strategies/test_dynamic_invariants.py"
FACE = "tests/scaler/test_loss_scaler.py"
FOREIGN = "tests/scaler/test_foreign_scales.py"
GRADIENTS = "tests/scaler/test_gradients.py"
MASTERS = "tests/scaler/test_masters.py"
MEASUREMENT = "tests/scaler/test_measurement.py"
PACKED = "tests/scaler/test_packed.py"
REPLICAS = "tests/mutants/test_replica_guards.py"
ROLLBACK = "tests/scaler/test_rollback.py"
SCALES = "tests/scaler/test_one_scale_a_step.py"
SENTENCES = "tests/scaler/test_outcome_sentences.py"
FIT = "tests/keras/test_keras_fit.py"
OTHER_NAMES = "tests/keras/test_tf_keras_names.py"
PROTECT = "tests/keras/test_protect.py"
SAVE = "tests/keras/test_keras_save.py"
WINDOW = "tests/loops/test_accumulate.py"
WINDOW_SUMS = "tests/loops/test_accumulate_gradients.py"

BREAKAGES = {
    # Corrupts
    "finite_is_inverted": f"{APPLY}::test_a_generator_of_gradients_and_a_tuple_of_variables_will_do",
    "nan_is_caught_infinity_is_not": f"{APPLY}::test_variables_of_16_bits_may_be_updated_when_asked_for[graph]",
    "norm_over_variables_is_not_looked_at": f"{APPLY}::test_a_norm_that_overflows_only_over_all_variables_is_skipped",
    "large_gradients_are_finite": f"{GRADIENTS}::test_all_finite",
    "duplicates_are_not_summed": f"{APPLY}::test_embedding_gradients_with_duplicate_indices[graph-SGD]",
    "non_finite_state_is_kept": f"{ROLLBACK}::test_an_applied_step_puts_back_only_what_is_no_longer_finite[graph]",
    "window_keeps_non_finite_state": (
        f"{WINDOW_SUMS}::test_statistics_that_overflow_float16_are_not_kept_until_the_window_ends"
    ),
    "masters_are_rounded_to_infinity": f"{MASTERS}::test_a_master_beyond_the_range_saturates",
    "accumulator_takes_infinities": f"{WINDOW}::test_a_bad_micro_batch_skips_its_window_only[float32-i-0]",
    "scaled_norms_are_always_trusted": f"{MEASUREMENT}::test_extremes",
    # Leaves its range
    "no_floor": f"{INVARIANTS}::test_300_nonfinite_steps_end_on_the_floor_and_clean_ones_leave_it",
    "no_ceiling": f"{INVARIANTS}::test_300_finite_steps_end_on_the_ceiling_and_a_nonfinite_one_leaves_it",
    "foreign_scale_is_used_as_it_is": FOREIGN,
    "nan_scale_is_used_as_it_is": FOREIGN,
    # Half-skips
    "skip_advances_iterations": f"{ROLLBACK}::test_a_skipped_step_leaves_every_optimizer_alone[SGD]",
    "no_rollback": f"{ROLLBACK}::test_skipped_batches_leave_no_bit_changed_and_the_run_goes_on_as_without_them[graph]",
    "snapshot_is_the_variable_itself": f"{ROLLBACK}::test_restoring_puts_back_every_bit_of_any_dtype[graph]",
    "masters_are_rounded_before_the_update": f"{MASTERS}::test_any_mix_of_dtypes[graph]",
    "masters_are_never_refreshed": f"{MASTERS}::test_keras_set_weights_counts",
    "masters_are_the_rounded_values": (
        f"{MASTERS}::test_updates_too_small_for_16_bits_add_up_in_the_master[graph-float16-0.000244140625]"
    ),
    "accumulator_keeps_a_skipped_window": f"{WINDOW}::test_a_bad_micro_batch_skips_its_window_only[float32-i-1]",
    "last_micro_batch_decides": f"{WINDOW}::test_a_bad_micro_batch_skips_its_window_only[float32-i-0]",
    "window_is_a_micro_batch_short": f"{WINDOW}::test_a_bad_micro_batch_skips_its_window_only[float32-i-0]",
    "window_forgets_where_it_began": f"{WINDOW}::test_a_bad_micro_batch_skips_its_window_only[float32-i-1]",
    "accumulator_adds_in_16_bits": f"{WINDOW_SUMS}::test_repeated_tokens_are_summed_in_float32",
    "clusters_never_refresh_masters": f"{CLUSTERS}::test_weights_that_were_assigned_are_taken_over",
    "clusters_never_round_masters": f"{CLUSTERS}::test_masters_are_updated_and_rounded[None-float16]",
    "clusters_forget_weight_decay": f"{CLUSTERS}::test_every_optimizer_moves_as_it_does_by_itself[AdamW]",
    "masters_that_a_graph_reads_are_moved": (
        f"{PACKED}::test_masters_that_a_function_was_traced_with_are_not_kept_in_a_buffer"
    ),
    "packed_weights_move_the_other_way": f"{PACKED}::test_every_optimizer_moves_as_it_does_by_itself[Adam]",
    "clusters_forget_embeddings": f"{CLUSTERS}::test_embedding_gradients_go_beside_the_clusters",
    # Mixes scales
    "norms_are_unscaled_once": f"{MEASUREMENT}::test_a_power_of_two_changes_no_bit",
    "clusters_do_not_clip": f"{CLUSTERS}::test_masters_are_updated_and_rounded[0.5-float16]",
    "unscale_by_the_next_scale": f"{SCALES}::test_every_applied_step_moves_by_the_true_gradient[graph-float32]",
    "scale_used_is_ignored": f"{SCALES}::test_an_apply_after_an_update_unscales_by_the_scale_before_it",
    "clip_before_unscale": f"{FACE}::test_clipping_comes_after_unscaling[graph]",
    "each_norm_is_the_global_one": f"{CLIPPING}::test_what_arrives_is_clipped_after_unscaling[graph-ClipByNorm-0.5]",
    "packed_gradients_are_clipped_as_one": f"{CLIPPING}::test_packed_slots_see_clipped_gradients[ClipByNorm]",
    "clipped_norm_is_the_one_before": f"{CLIPPING}::test_what_arrives_is_clipped_after_unscaling[graph-clip_norm-0.5]",
    "unscaled_in_float16": f"{GRADIENTS}::test_unscaling_works_in_float32_so_that_small_gradients_survive",
    # Disagrees
    "only_replica_0_decides": f"{REPLICAS}::test_an_overflow_on_either_replica_skips_both",
    "decide_before_reducing": f"{REPLICAS}::test_what_counts_is_the_sum",
    "optimizer_sums_again": f"{REPLICAS}::test_the_sum_moves_both_replicas_once",
    "loss_of_replica_0_only": f"{REPLICAS}::test_a_bad_loss_on_either_replica_is_the_cause",
    # Half-skips, in what follows the steps
    "attempts_are_applied_steps": f"{ATTEMPTS}::test_a_window_is_one_attempt",
    "average_is_zero_before_the_first_step": (
        f"{AVERAGED}::test_it_is_the_average_of_the_float32_weights_over_applied_steps[float16]"
    ),
    # Sticks silently
    "hysteresis_is_never_refilled": (
        f"{INVARIANTS}::test_a_spent_budget_backs_off_at_every_step_until_a_growth_refills_it"
    ),
    "growth_is_a_step_late": f"{DYNAMIC}::test_numbers_given_as_python_values_act_as_tensors_do[loop]",
    "growth_does_not_restart_the_count": f"{DYNAMIC}::test_numbers_given_as_python_values_act_as_tensors_do[loop]",
    "strategy_never_hears_of_a_skip": f"{FACE}::test_the_outcome_says_what_happened[graph]",
    "a_step_that_breaks_off_is_counted": f"{FACE}::test_a_step_that_breaks_off_in_the_optimizer_is_not_counted",
    "skips_count_as_applied": f"{FACE}::test_counters[graph]",
    "consecutive_skips_never_end": f"{FACE}::test_counters[graph]",
    "last_skip_is_not_recorded": f"{SENTENCES}::test_the_scaler_knows_the_names_of_what_it_applied",
    "a_bad_loss_is_blamed_for_ever": f"{SENTENCES}::test_a_bad_loss_is_blamed_for_its_own_step_only",
    "backward_is_not_told_from_overflow": f"{CAUSES}::test_a_step_says_why_it_was_skipped[graph-square root at 0]",
    "the_last_skip_stays_presumed": f"{CAUSES}::test_a_step_says_why_it_was_skipped[graph-square root at 0]",
    "joined_gradients_forget_their_order": f"{PACKED}::test_a_skip_names_the_gradient_among_packed_and_others[3]",
    # In Keras
    "keras_window_takes_infinities": f"{FIT}::test_a_window_that_overflows_ends_where_it_would_have_ended",
    "keras_window_forgets_an_overflow": f"{FIT}::test_a_window_that_overflows_ends_where_it_would_have_ended",
    "averages_before_any_step_are_taken": (
        f"{FIT}::test_averages_are_taken_over_at_the_end_and_only_if_there_are_any[float16]"
    ),
    "new_values_are_unscaled": (
        f"{FIT}::test_a_variable_that_takes_its_gradient_is_left_alone_by_scale_norm_and_clipping"
    ),
    "multi_optimizers_are_compiled": f"{FIT}::test_keras_distributes_variables_over_optimizers_inside",
    "protect_puts_nothing_back": f"{PROTECT}::test_a_skipped_batch_never_happened[{{}}]",
    "protect_keeps_infinite_statistics": (
        f"{PROTECT}::test_statistics_that_overflow_on_an_applied_step_keep_their_last_finite_value"
    ),
    "unscaled_by_hand_is_unscaled_again": (
        f"{OTHER_NAMES}::test_gradients_that_were_unscaled_by_hand_count_so_until_the_next_loss"
    ),
    "unscaled_by_hand_is_for_ever": (
        f"{OTHER_NAMES}::test_gradients_that_were_unscaled_by_hand_count_so_until_the_next_loss"
    ),
    "gradients_of_one_variable_replace_each_other": (
        "tests/keras/test_gradients_of_one_variable.py::test_their_sum_is_taken_in_float32"
    ),
    "masters_are_strangers": (
        "tests/scaler/test_masters_are_known.py::test_what_is_excluded_from_weight_decay[with_loss_scaler-by_variable]"
    ),
    "protect_shows_metrics_only": (
        "tests/keras/test_protect_shows.py::test_a_loss_that_no_tracker_saw_is_what_is_shown[{}]"
    ),
    "swapped_masters_stay_unwritten": (
        "tests/keras/test_callbacks_and_averages.py::test_averages_are_swapped_in_for_evaluation_and_out_again[float16]"
    ),
    "masters_are_not_saved_with_keras": f"{SAVE}::test_training_goes_on_bit_for_bit[float16-ema]",
    "strategy_of_a_file_is_imported": f"{SAVE}::test_a_file_does_not_choose_what_is_imported",
    "steps_of_fit_on_replicas_are_tried": (
        "tests/distributed/test_fit_on_replicas.py::test_what_keras_cannot_do_there_is_refused[steps]"
    ),
}
