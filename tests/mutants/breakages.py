"""Hand-made breakages of the stateful parts: a patch, and the test that has to go red when it is applied.

Read it as a list of the guards: take one out, and this is who notices. Patches are in `patches/`, by name.
"""

ATTEMPTS = "tests/loops/step/test_schedules.py"
AVERAGED = "tests/loops/actions/test_averaged.py"
APPLY = "tests/scaler/test_apply.py"
CAUSES = "tests/faults/test_causes.py"
CLIPPING = "tests/scaler/test_clipping.py"
CLUSTERS = "tests/scaler/test_clusters.py"
CUT_WEIGHTS = "tests/scaler/test_cut_weights.py"
DEFAULT_SCALING = "tests/loops/step/test_step_default_scaling.py"
DUPLICATES = "tests/scaler/test_duplicates.py"
DYNAMIC = "tests/scaler/strategies/test_dynamic.py"
JOINED = "tests/scaler/test_joined.py"
IN_A_TRACE = "tests/keras/test_built_in_a_trace.py"
KERAS_TWO = "tests/scaler/test_tf_keras_optimizers.py"
INVARIANTS = "tests/scaler/strategies/test_dynamic_invariants.py"
FLOAT64 = "tests/scaler/test_float64.py"
FACE = "tests/scaler/test_loss_scaler.py"
FORGOTTEN = "tests/scaler/test_forgotten_rollback.py"
FOREIGN = "tests/scaler/test_foreign_scales.py"
GRADIENTS = "tests/scaler/test_gradients.py"
MASTERS = "tests/scaler/test_masters.py"
MOSTLY_SKIPPED = "tests/faults/test_mostly_skipped.py"
MEASUREMENT = "tests/scaler/test_measurement.py"
PROOFS = "tests/scaler/test_proofs.py"
REPLICAS = "tests/mutants/test_replica_guards.py"
REPLICA_UPDATES = "tests/distributed/test_transaction_on_replicas.py"
ROLLBACK = "tests/scaler/test_rollback.py"
SCALES = "tests/scaler/test_one_scale_a_step.py"
SENTENCES = "tests/scaler/test_outcome_sentences.py"
FIT = "tests/keras/test_keras_fit.py"
OTHER_NAMES = "tests/keras/test_tf_keras_names.py"
PROTECT = "tests/keras/test_protect.py"
KERAS_WINDOW = "tests/keras/test_scale_moves_in_a_keras_window.py"
ONCE = "tests/scaler/test_scaled_once.py"
SAVE = "tests/keras/test_keras_save.py"
STEPS = "tests/scaler/test_apply_steps.py"
TRAINABLE = "tests/scaler/test_trainable.py"
UNSEEN = "tests/scaler/test_unseen_loss.py"
UPDATES = "tests/scaler/test_transaction.py"
WHERE = "tests/faults/test_where_it_began.py"
WINDOW = "tests/loops/step/test_accumulate.py"
CARRIED = "tests/scaler/test_carried_scale.py"
WINDOW_SCALE = "tests/loops/step/test_scale_moves_in_a_window.py"
WINDOW_SUMS = "tests/loops/step/test_accumulate_gradients.py"
WRITTEN = "tests/loops/step/test_scalers_in_graph.py"

BREAKAGES = {
    # Corrupts
    "finite_is_inverted": f"{APPLY}::test_a_generator_of_gradients_and_a_tuple_of_variables_will_do",
    "nan_is_caught_infinity_is_not": f"{APPLY}::test_variables_of_16_bits_may_be_updated_when_asked_for[graph]",
    "norm_over_variables_is_not_looked_at": f"{APPLY}::test_a_norm_that_overflows_only_over_all_variables_is_skipped",
    "updates_are_not_looked_at": f"{UPDATES}::test_every_bit_is_as_before_and_the_cause_is_named[graph-Adagrad]",
    "subclasses_are_proven": f"{UPDATES}::test_every_bit_is_as_before_and_the_cause_is_named[graph-a slot of a user's]",
    "sums_of_squares_are_proven": f"{PROOFS}::test_nothing_is_proven_of_others[Adagrad]",
    "centered_is_proven": f"{UPDATES}::test_a_centered_root_mean_square_never_makes_a_nan",
    "any_learning_rate_is_proven": f"{PROOFS}::test_a_schedule_that_gives_nan_skips_its_steps",
    "only_replica_0_looks_at_its_update": f"{REPLICA_UPDATES}::test_one_replica_is_enough[1]",
    "slots_copy_weights_that_have_no_values": f"{IN_A_TRACE}::test_a_step_by_hand_that_makes_its_layer",
    "large_gradients_are_finite": f"{GRADIENTS}::test_all_finite",
    "duplicates_are_not_summed": f"{APPLY}::test_embedding_gradients_with_duplicate_indices[graph-SGD]",
    "duplicates_that_cancel_are_finite": (
        f"{DUPLICATES}::test_what_cannot_be_squared_alone_or_summed_is_skipped[values2]"
    ),
    "kept_duplicates_are_summed": f"{DUPLICATES}::test_duplicates_that_are_kept_give_the_bits_of_keras[Adam-1.0]",
    "non_finite_state_is_kept": f"{ROLLBACK}::test_an_applied_step_puts_back_only_what_is_no_longer_finite[graph]",
    "window_keeps_non_finite_state": (
        f"{WINDOW_SUMS}::test_statistics_that_overflow_float16_are_not_kept_until_the_window_ends"
    ),
    "masters_are_rounded_to_infinity": f"{MASTERS}::test_a_master_beyond_the_range_saturates",
    "accumulator_takes_infinities": f"{WINDOW}::test_a_bad_micro_batch_skips_its_window_only[float32-0-i]",
    "scaled_norms_are_always_trusted": f"{MEASUREMENT}::test_extremes",
    # Leaves its range
    "no_floor": f"{INVARIANTS}::test_300_nonfinite_steps_end_on_the_floor_and_clean_ones_leave_it",
    "no_ceiling": f"{INVARIANTS}::test_300_finite_steps_end_on_the_ceiling_and_a_nonfinite_one_leaves_it",
    "foreign_scale_is_used_as_it_is": FOREIGN,
    "nan_scale_is_used_as_it_is": FOREIGN,
    # Half-skips
    "a_failed_update_stays": f"{UPDATES}::test_every_bit_is_as_before_and_the_cause_is_named[graph-Adagrad]",
    "masters_of_a_failed_update_stay": f"{UPDATES}::test_masters_and_the_model_are_put_back[a function-float16]",
    "skip_advances_iterations": f"{ROLLBACK}::test_a_skipped_step_leaves_every_optimizer_alone[SGD]",
    "no_rollback": f"{ROLLBACK}::test_skipped_batches_leave_no_bit_changed_and_the_run_goes_on_as_without_them[graph]",
    "missing_snapshot_stays_missing": f"{FORGOTTEN}::test_a_missing_snapshot_is_made_up_for[graph-float32]",
    "snapshot_is_the_variable_itself": f"{ROLLBACK}::test_restoring_puts_back_every_bit_of_any_dtype[graph]",
    "masters_are_rounded_before_the_update": f"{MASTERS}::test_any_mix_of_dtypes[graph]",
    "masters_are_never_refreshed": f"{MASTERS}::test_keras_set_weights_counts",
    "masters_are_the_rounded_values": (
        f"{MASTERS}::test_updates_too_small_for_16_bits_add_up_in_the_master[graph-float16-0.000244140625]"
    ),
    "accumulator_keeps_a_skipped_window": f"{WINDOW}::test_a_bad_micro_batch_skips_its_window_only[float32-1-n]",
    "last_micro_batch_decides": f"{WINDOW}::test_a_bad_micro_batch_skips_its_window_only[float32-0-i]",
    "window_blames_all_weights": f"{WHERE}::test_a_window_names_what_its_first_bad_micro_batch_had",
    "window_is_a_micro_batch_short": f"{WINDOW}::test_a_bad_micro_batch_skips_its_window_only[float32-0-i]",
    "window_forgets_where_it_began": f"{WINDOW}::test_a_bad_micro_batch_skips_its_window_only[float32-1-n]",
    "accumulator_adds_in_16_bits": f"{WINDOW_SUMS}::test_repeated_tokens_are_summed_in_float32",
    "clusters_never_refresh_masters": f"{CLUSTERS}::test_weights_that_were_assigned_are_taken_over",
    "clusters_never_round_masters": f"{CLUSTERS}::test_masters_are_updated_and_rounded[None-float16]",
    "clusters_forget_weight_decay": f"{CLUSTERS}::test_every_optimizer_moves_as_it_does_by_itself[AdamW]",
    "clusters_forget_embeddings": f"{CLUSTERS}::test_embedding_gradients_go_beside_the_clusters",
    "compiled_slots_stand_still": f"{CLUSTERS}::test_every_optimizer_moves_as_it_does_by_itself[AdamW]",
    "single_variables_forget_weight_decay": (
        f"{JOINED}::test_joined_variables_get_the_bits_of_the_optimizers_own_update[AdamW]"
    ),
    "joined_never_refresh_masters": f"{JOINED}::test_values_assigned_to_the_model_are_taken_over",
    "joined_never_round_masters": f"{JOINED}::test_values_assigned_to_the_model_are_taken_over",
    "joined_forget_weight_decay": f"{JOINED}::test_joined_variables_get_the_bits_of_the_optimizers_own_update[AdamW]",
    "joined_ignore_exclusions": f"{JOINED}::test_only_what_is_alike_is_joined",
    "joined_with_new_values": f"{JOINED}::test_only_what_is_alike_is_joined",
    "joined_whatever_the_clipping": f"{JOINED}::test_float32_variables_too_with_each_clipping[norm]",
    "every_optimizer_is_joined": f"{JOINED}::test_other_optimizers_are_not_given_joined_variables[lamb]",
    "a_twin_that_moves_nothing_is_not_missed": f"{JOINED}::test_an_optimizer_that_moves_nothing_is_refused",
    # Mixes scales
    "norms_are_unscaled_once": f"{MEASUREMENT}::test_a_power_of_two_changes_no_bit",
    "clusters_do_not_clip": f"{CLUSTERS}::test_masters_are_updated_and_rounded[0.5-float16]",
    "unscale_by_the_next_scale": f"{SCALES}::test_every_applied_step_moves_by_the_true_gradient[graph-float32]",
    "gradients_carry_the_last_scale": (
        f"{CARRIED}::test_a_gradient_waits_while_the_scale_moves_and_another_loss_is_scaled[graph-update]"
    ),
    "eager_gradients_carry_the_last_scale": (
        f"{CARRIED}::test_a_gradient_waits_while_the_scale_moves_and_another_loss_is_scaled[eager-apply]"
    ),
    "functions_are_not_seen": (
        "tests/scaler/test_eager_beside_functions.py::test_two_steps_of_another_model_come_between[functions3]"
    ),
    "lists_of_tensors_carry_nothing": "tests/scaler/test_ways_of_gradients.py::test_another_scaler_is_refused[map_fn]",
    "a_loop_carries_the_last_scale": (
        "tests/scaler/test_kept_sums.py::test_what_a_loop_carries_from_pass_to_pass[a momentum]"
    ),
    "kept_gradients_carry_the_last_scale": (
        f"{CARRIED}::test_a_gradient_that_a_variable_kept_for_a_step_is_refused[update]"
    ),
    "kept_sums_are_not_looked_at": "tests/scaler/test_kept_sums.py::test_what_no_window_begins_anew_is_refused",
    "window_mixes_scales": f"{WINDOW_SCALE}::test_a_bound_that_is_a_variable",
    "keras_window_mixes_scales": f"{KERAS_WINDOW}::test_an_update_in_the_middle[graph-True]",
    "a_log_hides_a_forgotten_scale": (
        "tests/scaler/test_nothing_upstream.py::test_a_log_of_the_scale_hides_nothing[False]"
    ),
    "half_probabilities_are_for_train_steps": (
        "tests/scaler/test_half_outputs.py::test_probabilities_are_named_in_fit_and_by_hand_too[by_hand]"
    ),
    "a_scaled_loss_is_scaled_again": f"{ONCE}::test_a_loss_scaled_twice_is_refused[graph]",
    "a_scale_by_hand_is_scaled_again": (
        f"{ONCE}::test_a_loss_multiplied_by_the_scale_is_not_scaled_again[in the tape]"
    ),
    "unscaled_by_hand_is_applied_as_scaled": f"{ONCE}::test_gradients_divided_by_the_scale_are_not_unscaled_again",
    "scale_used_is_ignored": "tests/scaler/test_hand_scaled.py::test_gradients_that_come_as_arguments_of_two_decisions",
    "clip_before_unscale": f"{FACE}::test_clipping_comes_after_unscaling[graph]",
    "each_norm_is_the_global_one": f"{CLIPPING}::test_what_arrives_is_clipped_after_unscaling[graph-ClipByNorm-0.5]",
    "clipped_norm_is_the_one_before": f"{CLIPPING}::test_what_arrives_is_clipped_after_unscaling[graph-clip_norm-0.5]",
    "float64_is_unscaled_in_float32": f"{FLOAT64}::test_training_is_that_without_scaling_bit_for_bit",
    "float64_variables_get_float32_gradients": f"{FLOAT64}::test_a_gradient_of_another_dtype_becomes_the_variables",
    "slots_of_keras_two_are_not_put_back": f"{KERAS_TWO}::test_an_update_that_is_not_finite_is_rolled_back",
    "unscaled_in_float16": f"{GRADIENTS}::test_unscaling_works_in_float32_so_that_small_gradients_survive",
    "a_weight_is_in_the_group_of_its_owner": (
        f"{CUT_WEIGHTS}::test_a_weight_that_is_read_on_both_sides_of_a_cut_is_refused[closure]"
    ),
    # Disagrees
    "only_replica_0_decides": f"{REPLICAS}::test_an_overflow_on_either_replica_skips_both",
    "decide_before_reducing": f"{REPLICAS}::test_what_counts_is_the_sum",
    "optimizer_sums_again": f"{REPLICAS}::test_the_sum_moves_both_replicas_once",
    "loss_of_replica_0_only": f"{REPLICAS}::test_a_bad_loss_on_either_replica_is_the_cause",
    # Another Keras
    "steps_never_called_are_not_missed": (
        f"{STEPS}::test_a_method_that_is_there_and_not_called_is_refused_before_anything_moves"
    ),
    "gradients_may_be_summed_twice": (
        f"{STEPS}::test_several_replicas_are_refused_where_gradients_would_be_summed_twice"
    ),
    # Half-skips, in what follows the steps
    "attempts_are_applied_steps": f"{ATTEMPTS}::test_a_window_is_one_attempt",
    "average_is_zero_before_the_first_step": (
        f"{AVERAGED}::test_it_is_the_average_of_the_float32_weights_over_applied_steps[float16]"
    ),
    # Changed under a step
    "unfrozen_in_a_snapshot_is_silent": (
        f"{TRAINABLE}::test_a_layer_that_was_unfrozen_is_noticed_by_the_snapshot[graph]"
    ),
    "an_old_compiled_fit_goes_on": (
        "tests/keras/test_loss_scale_logger.py::test_a_fit_that_was_not_compiled_again_is_refused[unfrozen]"
    ),
    "traced_steps_are_not_asked": f"{TRAINABLE}::test_a_traced_function_does_not_train_a_layer_that_was_frozen",
    # Sticks silently
    "an_infinite_loss_is_silent": f"{UNSEEN}::test_an_applied_step_with_such_a_loss_is_said_once[graph-inf]",
    "written_steps_are_applied": f"{WRITTEN}::test_a_step_that_returns_its_loss_alone_is_counted_right[apply-4]",
    "float16_is_not_scaled": f"{DEFAULT_SCALING}::test_small_losses_train[mixed_float16]",
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
    "a_skip_is_named_after_another_apply": (
        "tests/scaler/test_names_of_two_applies.py::test_the_variable_of_the_skip_is_named[graph]"
    ),
    "a_bad_loss_is_blamed_for_ever": f"{SENTENCES}::test_a_bad_loss_is_blamed_for_its_own_step_only",
    "backward_is_not_told_from_overflow": f"{CAUSES}::test_a_step_says_why_it_was_skipped[graph-square root at 0]",
    "skips_between_clean_steps_are_never_too_many": (
        f"{MOSTLY_SKIPPED}::test_most_steps_skipped_is_found_however_rare_the_visits[1000-100-200]"
    ),
    "a_restored_scaler_is_blamed_for_the_past": f"{MOSTLY_SKIPPED}::test_a_restored_scaler_is_judged_from_there_on",
    "a_stateful_rnn_keeps_a_skipped_batch": (
        "tests/loops/step/test_state_of_step.py::test_a_step_by_hand_puts_it_back[LSTM]"
    ),
    "an_undone_update_keeps_the_forward_pass": (
        "tests/loops/step/test_state_of_step.py"
        "::test_an_update_that_is_taken_back_leaves_the_weight_as_before_the_forward_pass"
    ),
    "what_nobody_can_put_back_is_repeated": (
        "tests/loops/step/test_again.py::test_what_nobody_can_put_back_is_done_once[iterator]"
    ),
    "a_second_look_is_not_rewritten": (
        "tests/faults/test_causes.py::test_a_look_again_with_python_branches_is_rewritten_as_the_step_is"
    ),
    "what_float16_flushes_is_an_overflow": (
        f"{WHERE}::test_a_singular_derivative_is_not_called_an_overflow_though_float16_flushes_it"
        "[mixed_float16-32768.0-2048]"
    ),
    "a_bad_weight_is_not_looked_at": f"{WHERE}::test_a_weight_that_is_not_finite_already_is_named[float32-nan]",
    "the_last_skip_stays_presumed": f"{CAUSES}::test_a_step_says_why_it_was_skipped[graph-square root at 0]",
    "the_last_skip_of_replicas_stays_presumed": (
        "tests/distributed/test_causes_on_replicas.py::test_one_cause_for_all[0.0-2-0]"
    ),
    "a_second_run_is_let_in": (
        "tests/loops/support/test_held_places.py::test_a_second_loop_of_the_process_is_refused_while_the_first_one_runs"
    ),
    "outputs_of_one_dtype_are_the_first": "tests/loops/loop/test_stacked.py::test_a_value_keeps_its_bits",
    "what_may_end_counts_as_endless": (
        "tests/loops/loop/test_loop_data.py::test_what_is_sure_never_to_end[generator-False]"
    ),
    "columns_are_not_all_summed": (f"{MEASUREMENT}::test_large_tensors_are_summed_with_all_their_values[shape0-xla]"),
    "the_count_of_steps_is_one_ahead": ("tests/backend/test_iterations.py::test_replicas_read_it_once_each[2]"),
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
    "the_tables_of_a_step_stay_behind": (
        "tests/loops/loop/test_held.py::test_what_can_be_saved_goes_on_bit_for_bit_without_a_warning[MutableHashTable]"
    ),
    "an_operation_nobody_knows_keeps_nothing": (
        "tests/loops/loop/test_held.py::test_what_cannot_be_saved_is_named[queue]"
    ),
    "parts_of_two_scalers_are_added": "tests/scaler/test_mixed_scales.py::test_parts_of_other_scales_are_refused",
    "python_is_differentiated_twice": (
        "tests/loops/step/test_again.py::test_a_loss_that_calls_python_is_differentiated_once"
    ),
    "lost_lines_are_not_told": (
        "tests/loops/record/test_damaged_logs.py::test_lines_that_the_file_has_lost_are_named_when_a_run_goes_on"
    ),
}
