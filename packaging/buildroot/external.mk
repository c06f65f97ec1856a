include $(sort $(wildcard $(BR2_EXTERNAL_CORACLE_PATH)/package/*/*.mk))
